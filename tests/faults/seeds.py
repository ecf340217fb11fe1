"""Seeds of fault tests: a few in the fast tier, as many as wanted by ``--fault-seeds``."""

import random
from collections import Counter
from dataclasses import dataclass, field


@dataclass(eq=False)
class Chance:
    """Decides by a seed, and counts what it decided. ``calm`` ends all faults."""

    seed: int
    injected: "Counter[str]" = field(default_factory=Counter)
    is_calm: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def strikes(self, kind: str, probability: float) -> bool:
        """Whether the fault happens now."""
        if self.is_calm or self.rng.random() >= probability:
            return False
        self.injected[kind] += 1
        return True

    def calm(self) -> None:
        """No faults from here on: progress is required."""
        self.is_calm = True

    def summary(self) -> str:
        """One line for the log."""
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.injected.items()))
        return f"seed {self.seed}: {faults or 'no fault struck'}"
