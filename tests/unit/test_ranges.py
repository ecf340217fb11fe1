"""Ranges against a plain set of integers."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sideband.ranges import Ranges

pairs = st.tuples(st.integers(0, 30), st.integers(0, 30))


@given(st.lists(pairs, max_size=12), pairs)
def test_ranges_are_a_set_of_positions(
    added: list[tuple[int, int]], asked: tuple[int, int]
) -> None:
    ranges, positions = Ranges(), set[int]()
    for start, stop in added:
        ranges.add(start, stop)
        positions |= set(range(start, stop))
    listed = ranges.to_list()
    assert [p for start, stop in listed for p in range(start, stop)] == sorted(positions)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(listed))
    gaps = ranges.missing(*asked)
    assert {p for start, stop in gaps for p in range(start, stop)} == set(range(*asked)) - positions
    assert all(start < stop for start, stop in gaps)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(gaps))
