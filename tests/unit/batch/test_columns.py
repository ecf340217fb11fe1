"""Runs against the dense column they stand for."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sideband.batch.columns import Runs

VALUES = [0.0, -0.0, 1.5, float("nan"), float("inf")]


def bits(column: NDArray[np.float32] | NDArray[np.int32]) -> list[int]:
    values: list[int] = column.view(np.int32).tolist()
    return values


columns = st.lists(st.sampled_from(VALUES), max_size=30).map(lambda v: np.array(v, np.float32))


@given(columns)
def test_runs_are_exact_to_the_bit_and_as_few_as_can_be(column: NDArray[np.float32]) -> None:
    runs = Runs.of(column)
    assert bits(runs.expand()) == bits(column)
    assert len(runs) == len(column)
    values = bits(runs.values_R)
    assert all(one != other for one, other in pairwise(values))


@given(columns, st.integers(0, 30), st.integers(0, 30))
def test_a_slice_equals_the_slice_of_the_column(
    column: NDArray[np.float32], one: int, other: int
) -> None:
    start, stop = sorted((min(one, len(column)), min(other, len(column))))
    assert bits(Runs.of(column).slice(start, stop).expand()) == bits(column[start:stop])


@given(st.lists(columns, min_size=1, max_size=5))
def test_concatenation_joins_equal_neighbours(parts: list[NDArray[np.float32]]) -> None:
    joined = Runs.concatenate([Runs.of(part) for part in parts])
    whole = Runs.of(np.concatenate(parts))
    assert bits(joined.values_R) == bits(whole.values_R)
    assert joined.lengths_R.tolist() == whole.lengths_R.tolist()


@given(columns.filter(len), st.data())
def test_windows_equal_the_windows_of_the_column(
    column: NDArray[np.float32], data: st.DataObject
) -> None:
    bounds = st.tuples(st.integers(0, len(column)), st.integers(0, len(column)))
    drawn = data.draw(st.lists(bounds.map(sorted).filter(lambda b: b[0] < b[1]), min_size=1))
    starts, stops = np.array(drawn, np.int64).T
    runs = Runs.of(column).windows(starts, stops)
    expected = np.concatenate([column[start:stop] for start, stop in drawn])
    assert bits(runs.expand()) == bits(expected)
    assert all(one != other for one, other in pairwise(bits(runs.values_R)))
