"""Who dies while a trainer goes back, and when: decided by a seed. Pure."""

import random
from dataclasses import dataclass
from typing import Final, Literal

Part = Literal["orchestrator", "feed", "rank"]
PARTS: Final[tuple[Part, ...]] = ("orchestrator", "feed", "rank")
POINTS: Final = ("before", "between", "reading")
STEPS_BACK: Final = (2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnPlan:
    """One going back: how it is said, how far it goes, and who dies at each point of it.

    ``before``: before it is decided, or while it is. ``between``: it is in the ledger, and the feed
    does not know. ``reading``: the ranks take their steps again.
    """

    is_by_start: bool  # by the settings of a start of the orchestrator; else by a request
    steps_back: int
    before: Part
    between: Part
    reading: Part

    @property
    def dead(self) -> tuple[Part, Part, Part]:
        """In the order in which they die."""
        return (self.before, self.between, self.reading)


def plan_returns(seed: int, *, count: int) -> list[ReturnPlan]:
    """Of three in a row every part dies at every point; of six, for both ways to say it."""
    rng = random.Random(seed)
    plans = []
    for turn in range(seed * count, (seed + 1) * count):
        before, between, reading = (PARTS[(turn + place) % len(PARTS)] for place in range(3))
        plans.append(
            ReturnPlan(
                is_by_start=turn // len(PARTS) % 2 == 1,
                steps_back=rng.randint(*STEPS_BACK),
                before=before,
                between=between,
                reading=reading,
            )
        )
    return plans
