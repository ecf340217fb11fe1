"""Counters and histograms for what happens on every request: counted by the event loop alone.

The library's own children lock and check at each step, which costs a busy service a tenth of its
time. These have the same names, labels and text; a scrape makes the library's families of them.
Not thread-safe.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Counts(Collector):
    """A counter by label values. ``name`` ends in ``_total``."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}
        registry.register(self)

    def add(self, *values: str, amount: float = 1.0) -> None:
        """Count ``amount`` under these label values."""
        self._values[values] = self._values.get(values, 0.0) + amount

    def collect(self) -> Iterable[Metric]:
        """What a scrape shows."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, amount in list(self._values.items()):
            family.add_metric(values, amount)
        yield family

    def describe(self) -> Iterable[Metric]:
        """The names, so that two metrics never share one."""
        yield CounterMetricFamily(self._name, self._text, labels=self._labels)


class Durations(Collector):
    """A histogram of seconds by label values; ``buckets`` are upper bounds, ascending."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = tuple(buckets)
        self._names = [*(repr(float(bound)) for bound in buckets), "+Inf"]
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def observe(self, *values: str, seconds: float) -> None:
        """Count one duration under these label values."""
        counts = self._counts.get(values)
        if counts is None:
            counts = self._counts[values] = [0] * len(self._names)
            self._sums[values] = 0.0
        counts[bisect_left(self._bounds, seconds)] += 1
        self._sums[values] += seconds

    def collect(self) -> Iterable[Metric]:
        """What a scrape shows: each bucket counts everything up to its bound."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, counts in list(self._counts.items()):
            reached, buckets = 0, []
            for name, count in zip(self._names, counts, strict=True):
                reached += count
                buckets.append((name, float(reached)))
            family.add_metric(values, buckets, self._sums[values])
        yield family

    def describe(self) -> Iterable[Metric]:
        """The names, so that two metrics never share one."""
        yield HistogramMetricFamily(self._name, self._text, labels=self._labels)
