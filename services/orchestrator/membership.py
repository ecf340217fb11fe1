"""What the next step holds. Pure.

Live, a step takes what is ready in the order in which it became so. In deterministic mode it takes
dispatch order: nothing passes a rollout that is still running or waits for its group.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from sideband.ids import RolloutId


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A ready rollout. ``order`` is the dispatch index in deterministic mode, else of arrival."""

    rollout_id: RolloutId
    order: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """A step is ``rollouts`` rollouts, or with ``tokens`` set as many as hold that many tokens."""

    rollouts: int
    tokens: int | None = None


def choose(
    candidates: Iterable[Candidate],
    *,
    size: StepSize,
    stop_before: int | None,
    is_last: bool,
) -> list[RolloutId]:
    """The rollouts of the next step, or none when it is not full.

    ``stop_before`` is the dispatch index of the first rollout that may still come (deterministic
    mode); ``is_last`` ships what there is.
    """
    chosen: list[RolloutId] = []
    tokens = 0
    for candidate in sorted(candidates, key=lambda candidate: candidate.order):
        if stop_before is not None and candidate.order >= stop_before:
            break
        chosen.append(candidate.rollout_id)
        tokens += candidate.tokens
        if tokens >= size.tokens if size.tokens else len(chosen) == size.rollouts:
            return chosen
    return chosen if is_last else []
