"""The steps that the feed holds: which one may come next, and which are done.

Errors: the StepRefused family.
"""

from typing import Final

from sideband.feed.errors import (
    FeedEnded,
    FeedFull,
    FeedPaused,
    OtherGridStep,
    OtherRunStep,
    StepConflict,
    StepOutOfOrder,
)
from sideband.feed.facts import FeedPlan, StepFacts
from sideband.model import ModelShape

DIGESTS_KEPT_MAX: Final = 1024  # a late repeat of a done step is still recognised


class HeldSteps:
    """Steps in order, from the oldest that some rank has not committed."""

    def __init__(self, plan: FeedPlan) -> None:
        self.plan = plan
        self.model: ModelShape | None = None
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.is_paused = False
        self.is_ended = False
        self._held: dict[int, StepFacts] = {}  # ascending
        self._digests: dict[int, str] = {}

    @property
    def steps(self) -> tuple[int, ...]:
        """What is held, ascending."""
        return tuple(self._held)

    @property
    def oldest(self) -> int | None:
        """The oldest held step."""
        return next(iter(self._held), None)

    @property
    def first_available(self) -> int | None:
        """The first step that a rank can still get; None while any may come."""
        if self.last_step is None:
            return None
        return self.oldest or self.last_step + 1

    def get(self, step: int) -> StepFacts | None:
        """One held step."""
        return self._held.get(step)

    def accept(self, facts: StepFacts, *, committed_step: int | None = None) -> bool:
        """Hold a step. False when it was taken before with the same content.

        What every rank has committed, up to ``committed_step``, need not come first.
        Raises OtherRunStep, OtherGridStep, StepConflict, StepOutOfOrder, FeedEnded, FeedPaused
        or FeedFull.
        """
        self._check_fit(facts)
        if (known := self._digests.get(facts.step)) is not None:
            if known != facts.digest:
                raise StepConflict(facts.step)
            return False
        last = self.last_step
        if last is not None and facts.step not in {last + 1, max(last, committed_step or 0) + 1}:
            raise StepOutOfOrder(facts.step, expected=last + 1)
        if self.is_ended:
            raise FeedEnded(facts.step)
        if self.is_paused:
            raise FeedPaused(facts.step)
        if len(self._held) >= self.plan.steps_held_max:
            raise FeedFull(facts.step, held=len(self._held))
        self._hold(facts)
        return True

    def _hold(self, facts: StepFacts) -> None:
        self._held[facts.step] = facts
        self._digests[facts.step] = facts.digest
        if len(self._digests) > DIGESTS_KEPT_MAX:
            del self._digests[next(iter(self._digests))]
        self.last_step = facts.step
        if self.first_step is None:
            self.first_step = facts.step
        self.model = self.model or facts.model

    def _check_fit(self, facts: StepFacts) -> None:
        plan = self.plan
        if facts.run_id != plan.run_id:
            raise OtherRunStep(facts.step, run_id=facts.run_id, expected=plan.run_id)
        for what, got, expected in (
            ("dp_size", facts.dp_size, plan.dp_size),
            ("cp_size", facts.cp_size, plan.cp_size),
            ("layout", facts.layout, plan.layout),
        ):
            if got != expected:
                raise OtherGridStep(facts.step, what, got=got, expected=expected)
        if None not in (facts.model, self.model) and facts.model != self.model:
            raise OtherGridStep(facts.step, "model", got=facts.model, expected=self.model)

    def go_back(self, step: int) -> tuple[int, ...]:
        """Drop every step after ``step``, and name them: the one after it comes next, again."""
        gone = tuple(held for held in self._held if held > step)
        for held in gone:
            del self._held[held]
        self._digests = {held: digest for held, digest in self._digests.items() if held <= step}
        self.is_ended = False
        if self.first_step is not None:
            self.first_step, self.last_step = min(self.first_step, step + 1), step
        return gone

    def forget(self, *, committed_step: int | None) -> tuple[int, ...]:
        """Drop the steps up to the one that every rank has committed, and name them."""
        gone = tuple(
            step for step in self._held if committed_step is not None and step <= committed_step
        )
        for step in gone:
            del self._held[step]
        return gone
