"""How long inputs are made up: for one seed, or seed after seed until the time is over."""

import time
from collections.abc import Callable, Iterator
from typing import Final

import hypothesis
from hypothesis import strategies as st

EXAMPLES_PER_SEED: Final = 150  # a second or two: how far a run may go over its time

Check = Callable[[st.DataObject], bool]


class Budget:
    """So many seeds as fit into ``seconds``, one at least; ``told`` says what was tried with them.

    A failing example names its seed, and ``--fuzz-seed`` begins with it.
    """

    def __init__(self, *, seconds: float, first_seed: int) -> None:
        self._seconds, self._first_seed = seconds, first_seed
        self._tried = self._refused = self._seeds = 0
        self.is_spent = False  # whether all of it was right

    def seeds(self) -> Iterator[int]:
        """Seed after seed; what is tried with each is told to ``count``.

        Some inputs must be refused, and some must not: else the test looks at one side only.
        """
        stop_s = time.monotonic() + self._seconds
        while self._seeds == 0 or time.monotonic() < stop_s:
            yield self._first_seed + self._seeds
            self._seeds += 1
        assert 0 < self._refused < self._tried, self.told
        self.is_spent = True

    def count(self, *, is_refused: bool) -> None:
        """One more input, and what became of it."""
        self._tried += 1
        self._refused += is_refused

    def spend(self, check: Check) -> None:
        """Call ``check`` with data to draw from, again and again; it says what was refused."""
        for seed in self.seeds():
            self._run_seed(check, seed)

    def _run_seed(self, check: Check, seed: int) -> None:
        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=EXAMPLES_PER_SEED,
            database=None,  # what runs depends on the seed alone
            deadline=None,
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(data=st.data())
        def one(data: st.DataObject) -> None:
            note_seed(seed)
            self.count(is_refused=check(data))

        one()

    @property
    def told(self) -> str:
        """What was tried, in words."""
        first, last = self._first_seed, self._first_seed + self._seeds - 1
        return f"{self._tried} tried, {self._refused} refused, seeds {first} to {last}"


def note_seed(seed: int) -> None:
    """Say in a failing example how to run its seed again."""
    hypothesis.note(f"replay: --fuzz-seed {seed}")
