"""How long inputs are made up: for one seed, or seed after seed until the time is over."""

import time
from collections.abc import Callable
from typing import Final

import hypothesis
from hypothesis import strategies as st

EXAMPLES_PER_SEED: Final = 150  # a second or two: how far a run may go over its time

Check = Callable[[st.DataObject], bool]


class Budget:
    """Runs a property on drawn data; ``told`` says on how much of it.

    With ``seconds`` 0 it stops after one seed. A failing example names its seed, and
    ``--fuzz-seed`` begins with it.
    """

    def __init__(self, *, seconds: float, first_seed: int) -> None:
        self._seconds, self._first_seed = seconds, first_seed
        self._tried = self._refused = self._seeds = 0
        self.is_spent = False  # whether all of it was right

    def spend(self, check: Check) -> None:
        """Call ``check`` with data to draw from, again and again; it says whether it was refused.

        Some inputs must be, and some must not: else the test looks at one side only.
        """
        stop_s = time.monotonic() + self._seconds
        while self._seeds == 0 or time.monotonic() < stop_s:
            self._run_seed(check, self._first_seed + self._seeds)
            self._seeds += 1
        assert 0 < self._refused < self._tried, self.told
        self.is_spent = True

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
            hypothesis.note(f"replay: --fuzz-seed {seed}")
            self._refused += check(data)
            self._tried += 1

        one()

    @property
    def told(self) -> str:
        """What was tried, in words."""
        first, last = self._first_seed, self._first_seed + self._seeds - 1
        return f"{self._tried} tried, {self._refused} refused, seeds {first} to {last}"
