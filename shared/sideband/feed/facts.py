"""What the delivery machine is told and what it answers. Plain data.

A *place* (step, index) is a cursor: everything before it is done.
"""

from dataclasses import dataclass
from typing import Final

import msgspec

from sideband.batch.types import Layout
from sideband.feed.ancestry import Line
from sideband.ids import RunId
from sideband.model import ModelShape

Place = tuple[int, int]
FIRST: Final[Place] = (0, 0)  # before everything: "from the oldest step"


def after(place: Place, count: int) -> Place:
    """The place after micro batch ``place`` of a step of ``count``."""
    step, index = place
    return (step, index + 1) if index + 1 < count else (step + 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedPlan:
    """What the feed serves; fixed while it lives."""

    run_id: RunId
    rank_count: int  # global ranks: processes, never data ranks
    dp_size: int
    cp_size: int
    layout: Layout
    steps_held_max: int
    peer_timeout_s: float
    rank_lost_fails_after_s: float | None = None  # None: a lost rank is only named


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What the machine must know of a step; the rows stay with the adapter."""

    run_id: RunId
    step: int
    count: int  # micro batches of each data rank
    digest: str  # of the body: equal digests are the same step
    dp_size: int
    cp_size: int
    layout: Layout
    model: ModelShape | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a rank says of itself. ``resume`` is the place from which it wants to receive."""

    instance: str  # fresh for every process
    run_id: RunId | None
    global_rank: int
    dp_rank: int
    cp_rank: int
    committed_step: int | None  # None: as the feed remembers
    resume: Place | None
    lineage: int | None  # of the micro batches that it got; None before the first
    committed_lineage: int | None  # in which its committed step was trained; None: it knows not
    credit: int
    model: ModelShape | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GoneBack:
    """The trainer went back to ``step``: what it did after that is void.

    ``lineage`` counts how often that happened; ``last_step`` is the last that was built of it.
    ``earlier`` are the returns before that still bound what may be held (``ancestry``).
    """

    lineage: int
    step: int
    last_step: int
    earlier: Line = ()


@dataclass(slots=True, kw_only=True, eq=False)
class RankState:
    """One global rank's process as the feed sees it. Only ``Delivery`` changes it."""

    global_rank: int
    dp_rank: int
    cp_rank: int
    instance: str
    lineage: int | None  # as its hello said
    generation: int
    connection: bytes | None  # None: absent, may come back
    credit: int
    next: Place  # to be sent
    read: Place  # everything before it was assembled by the rank
    last_seen_s: float
    seq_sent: int = 0
    seq_taken: int = 0
    told_release: Place = FIRST
    abort: "Abort | None" = None
    is_abort_told: bool = False
    is_end_told: bool = False

    @property
    def has_nothing(self) -> bool:
        """Its process got no micro batch yet: it is what its trainer restored."""
        return self.lineage is None and self.seq_sent == 0


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send micro batch ``index`` of ``count`` with this sequence number.

    ``released``: tell too that everything before this place was read by all.
    """

    step: int
    index: int
    count: int
    seq: int
    released: Place | None = None


class Release(msgspec.Struct, frozen=True, gc=False):
    """Tell the rank that everything before ``place`` was read by all."""

    place: Place


class Abort(msgspec.Struct, frozen=True, gc=False):
    """Tell the rank that the step failed."""

    step: int
    reason: str


class End(msgspec.Struct, frozen=True, gc=False):
    """Tell the rank that nothing follows ``last_step``; 0 when there was no step at all."""

    last_step: int


Decision = Send | Release | Abort | End


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why the last generation gave up; stands until every rank has come back."""

    step: int
    rank: int
    reason: str
