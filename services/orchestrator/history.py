"""What a run looks back on. Pure data."""

from dataclasses import dataclass
from typing import Literal

from sideband.feed.ancestry import Line
from sideband.ids import RolloutId


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """The run was begun, under the id that its settings gave to that start."""

    start_id: str | None
    begun_s: float


PolicySource = Literal["push", "poll", "setting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecord:
    """From ``applied_s`` on every serving engine had at least v(``policy_version``).

    ``number`` counts such changes from 0; a version that falls is one too. v(s) is what step s of
    the ``lineage`` yielded: ``trained_s`` is when every rank had committed it, None for v0, and
    where that is not known (yet). ``source``: who said so.
    """

    number: int
    policy_version: int
    lineage: int
    applied_s: float
    trained_s: float | None
    source: PolicySource


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnRecord:
    """The trainer went back to ``step``. All that it does not get again is named.

    ``lineage`` counts such times from 1. ``steps_again`` keep number and content, ``steps_reduced``
    keep their number without what is gone; of ``steps_gone`` nothing is left, and ``steps_moved``
    lay behind one of those: their rollouts are packed again, in order, under lower numbers.
    ``rollouts_dropped`` are those that are not trained again.
    """

    lineage: int
    step: int
    returned_s: float
    last_step: int  # the last that was built before
    steps_again: tuple[int, ...]
    steps_reduced: tuple[int, ...]
    steps_moved: tuple[int, ...]
    steps_gone: tuple[int, ...]
    rollouts_dropped: tuple[RolloutId, ...]
    files_missing: tuple[str, ...]
    start_id: str | None = None  # of the start that it was for; None: a request asked for it
    line: Line = ()  # this one too; empty where an earlier version kept it
