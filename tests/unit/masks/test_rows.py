"""Kept sets in memory against plain lists, and the questions asked about them."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.masks.rows import MaskRows
from sideband.masks.rules import (
    are_kept_sets,
    first_row_without,
    first_unsorted_row,
    row_of_each_id,
    row_of_id,
    runs_with_ids,
    starts_agree,
)
from tests.unit.masks.support import kept_sets, lists, mask_rows
from tests.unit.masks.ways import ARRAYS, WAYS, taking


@given(kept=kept_sets(100), data=st.data())
def test_slicing_and_joining_are_those_of_lists(kept: list[list[int]], data: st.DataObject) -> None:
    masks = mask_rows(kept)
    assert len(masks) == len(kept)
    assert lists(masks) == kept
    start = data.draw(st.integers(0, len(kept)))
    stop = data.draw(st.integers(start, len(kept)))
    middle = masks.slice(start, stop)
    assert lists(middle) == kept[start:stop]
    assert starts_agree(middle)
    joined = MaskRows.concatenate([masks.slice(0, start), middle, masks.slice(stop, len(kept))])
    assert joined.equals(masks)
    assert masks.equals(mask_rows(kept))


@given(kept=kept_sets(100))
def test_rows_with_ids_are_the_runs_between_those_without(kept: list[list[int]]) -> None:
    masks = mask_rows(kept)
    runs = runs_with_ids(masks)
    assert [row for first, last in runs for row in range(first, last)] == [
        row for row, ids in enumerate(kept) if ids
    ]
    assert all(before[1] < after[0] for before, after in pairwise(runs)), "neighbours are one run"
    assert lists(masks.with_ids()) == [ids for ids in kept if ids]


def test_nothing_joined_is_no_rows() -> None:
    assert len(MaskRows.concatenate([])) == 0
    assert lists(MaskRows.empty(3)) == [[], [], []]


def test_a_row_outside_is_an_index_error() -> None:
    masks = mask_rows([[1], [2]])
    for index in (-1, 2):
        with pytest.raises(IndexError):
            masks[index]


def test_rows_that_differ_in_either_array_are_not_equal() -> None:
    assert not mask_rows([[1], [2]]).equals(mask_rows([[1], [3]]))
    assert not mask_rows([[1], [2]]).equals(mask_rows([[1, 2], []]))


@pytest.mark.parametrize(
    ("starts", "ids"),
    [
        ([], []),
        ([1, 2], [5, 6]),
        ([0, 1], [5, 6]),
        ([0, 3], [5, 6]),
        ([0, 2, 1, 2], [5, 6]),
        ([[0, 2]], [5, 6]),
        ([0, 2], [[5, 6]]),
    ],
)
def test_starts_that_do_not_describe_the_ids_are_found(starts: object, ids: object) -> None:
    assert not starts_agree(MaskRows(np.array(starts, np.int64), np.array(ids, np.int32)))


@given(st.lists(st.lists(st.integers(0, 6), max_size=4), max_size=8))
def test_the_first_unsorted_row_is_that_of_a_loop(kept: list[list[int]]) -> None:
    expected = next((row for row, ids in enumerate(kept) if ids != sorted(set(ids))), None)
    assert first_unsorted_row(mask_rows(kept)) == expected


@given(st.lists(st.tuples(st.integers(0, 6), st.sets(st.integers(0, 6), max_size=4)), max_size=8))
def test_the_first_row_without_its_token_is_that_of_a_loop(
    rows: list[tuple[int, set[int]]],
) -> None:
    tokens = np.array([token for token, _ in rows], np.int32)
    masks = mask_rows([sorted(kept) for _, kept in rows])
    expected = next((i for i, (token, kept) in enumerate(rows) if kept and token not in kept), None)
    assert first_row_without(masks, tokens) == expected


@given(kept_sets(100))
def test_each_id_knows_its_row(kept: list[list[int]]) -> None:
    masks = mask_rows(kept)
    expected = [row for row, ids in enumerate(kept) for _ in ids]
    assert row_of_each_id(masks).tolist() == expected
    assert [row_of_id(masks, index) for index in range(len(expected))] == expected


@pytest.mark.parametrize("way", [way for way in WAYS if way != ARRAYS])
@given(
    kept=st.lists(st.lists(st.integers(-1, 9), max_size=3), max_size=4),
    tokens=st.lists(st.integers(-1, 9), min_size=4, max_size=4),
)
def test_one_pass_sees_what_all_questions_see(
    way: str, kept: list[list[int]], tokens: list[int]
) -> None:
    masks, tokens_N = mask_rows(kept), np.array(tokens[: len(kept)], np.int32)
    expected = (
        first_unsorted_row(masks) is None
        and first_row_without(masks, tokens_N) is None
        and all(0 <= token_id < 9 for row in kept for token_id in row)
    )
    with taking(way):
        assert are_kept_sets(masks, tokens_N, vocab_size=9) == expected
        tokens_N.flags.writeable = masks.ids_M.flags.writeable = False  # out of a message
        assert are_kept_sets(masks, tokens_N, vocab_size=9) == expected


@pytest.mark.parametrize("way", WAYS)
def test_ids_of_another_type_are_left_to_the_questions(way: str) -> None:
    """None is cut to 32 bits: 2^32 + 5 is not 5."""
    masks = mask_rows([[5]])
    with taking(way):
        assert not are_kept_sets(masks, np.array([2**32 + 5]), vocab_size=9)
