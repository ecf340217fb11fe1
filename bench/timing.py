"""Time several sides of one question in turn, so that drift and noise hit all of them alike."""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from bench.results import Measurement


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds per side and round; round i of all sides ran within the same moments."""

    seconds: dict[str, list[float]]

    def median(self, side: str) -> float:
        """The median round of one side."""
        return median(self.seconds[side])

    def ratio(self, side: str, other: str) -> float:
        """How many times ``side`` takes as long as ``other``: the median over paired rounds."""
        pairs = zip(self.seconds[side], self.seconds[other], strict=True)
        return median(first / second for first, second in pairs)

    def measurement(
        self, side: str, *, size_bytes: int | None = None, units: float = 0.0, unit: str = ""
    ) -> Measurement:
        """A row of the table; with ``units`` its rate per second in ``unit``."""
        middle = self.median(side)
        spread = (max(self.seconds[side]) - min(self.seconds[side])) / middle
        return Measurement(
            side=side,
            seconds=middle,
            spread=spread,
            bytes=size_bytes,
            rate=units / middle if units else None,
            rate_unit=unit,
        )


def paired(
    sides: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_ups: int = 1,
    repeat: int = 1,
    wake: Mapping[str, Callable[[], object]] | None = None,
) -> Timings:
    """Run every side once per round, each round beginning with another side.

    ``repeat`` calls make one timing, for sides that take microseconds. What a side returns is
    dropped inside its own timing, as its owner would. ``wake`` is called, untimed, right before
    each timing of its side, for sides that fall asleep while the others run.
    """
    names = list(sides)
    for _ in range(warm_ups):
        for name in names:
            sides[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if wake is not None:
                wake[name]()
            seconds[name].append(timed(sides[name], repeat=repeat))
    return Timings(seconds)


def timed(call: Callable[[], object], *, repeat: int = 1) -> float:
    """Seconds of one call. Garbage of earlier calls is collected first."""
    gc.collect()
    begin = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - begin) / repeat
