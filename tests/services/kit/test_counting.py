"""Our own counters show what the library's would."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from services.kit.counting import Counts, Durations

BUCKETS = (0.001, 0.5, 2.0)
seconds = st.sampled_from((0.0, 0.001, 0.002, 0.5, 2.0, 2.1, 700.0))


def shown(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9))))
def test_counts(steps: Sequence[tuple[str, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts = Counts("x_total", "Said.", ("kind", "form"), registry=ours)
    counter = Counter("x_total", "Said.", ("kind", "form"), registry=theirs)
    bare, other = Counts("y_total", "Y.", registry=ours), Counter("y_total", "Y.", registry=theirs)
    for kind, amount in steps:
        counts.add(kind, "f", amount=amount)
        counter.labels(kind, "f").inc(amount)
        bare.add()
        other.inc()
    assert shown(ours) == shown(theirs)


@given(st.lists(st.tuples(st.sampled_from("ab"), seconds)))
def test_durations(steps: Sequence[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    durations = Durations("x_seconds", "Said.", ("leg",), buckets=BUCKETS, registry=ours)
    histogram = Histogram("x_seconds", "Said.", ("leg",), buckets=BUCKETS, registry=theirs)
    for leg, value in steps:
        durations.observe(leg, seconds=value)
        histogram.labels(leg).observe(value)
    assert shown(ours) == shown(theirs)


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    Counts("x_total", "Said.", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Counter("x_total", "Said.", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Durations("x_total", "Said.", ("leg",), buckets=BUCKETS, registry=registry)
