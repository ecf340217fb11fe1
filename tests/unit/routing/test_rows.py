"""Which rows are a router's choice, and the way between all layers and routed layers."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sideband.errors import InvalidInput
from sideband.routing.rows import RowArray, scatter_layers, select_layers, valid_rows
from tests.unit.masks.ways import WAYS, taking


@st.composite
def rows_arrays(draw: st.DrawFn, *, top_k_max: int = 6) -> RowArray:
    """Small id spaces, so that repeats are common."""
    shape = (draw(st.integers(0, 9)), draw(st.integers(1, 4)), draw(st.integers(1, top_k_max)))
    ids = draw(st.integers(1, 40))
    seed = draw(st.integers(0, 1 << 32))
    dtype = draw(st.sampled_from([np.uint8, np.uint16]))
    rows: RowArray = np.random.default_rng(seed).integers(0, ids, shape).astype(dtype)
    return rows


def valid_by_hand(rows: RowArray) -> list[bool]:
    return [all(len(set(layer)) == len(layer) for layer in row) for row in rows.tolist()]


@given(rows_arrays())
def test_a_row_is_valid_when_no_layer_repeats_an_id(rows: RowArray) -> None:
    assert valid_rows(rows, id_space=256).tolist() == valid_by_hand(rows)


@given(rows_arrays(top_k_max=40))
def test_wide_routers_are_judged_by_the_same_rule(rows: RowArray) -> None:
    assert valid_rows(rows, id_space=256).tolist() == valid_by_hand(rows)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("top_k", "dtype"), [(8, np.uint8), (4, np.uint16)])
@given(data=st.data())
def test_lists_that_fill_a_word_are_judged_by_the_same_rule(
    way: str, top_k: int, dtype: type[np.unsignedinteger[Any]], data: st.DataObject
) -> None:
    """Every id that there is, ids that differ in one bit, and all pairs of places."""
    ids_max = int(np.iinfo(dtype).max)
    ids = st.one_of(
        st.integers(0, ids_max), st.sampled_from([0, 1, 128, 255, ids_max - 1, ids_max])
    )
    layer = st.lists(ids, min_size=top_k, max_size=top_k, unique=True)
    rows = np.array(data.draw(st.lists(st.tuples(layer, layer), min_size=1, max_size=5)), dtype)
    for index in range(len(rows)):
        if data.draw(st.booleans()):
            first, second = data.draw(st.permutations(range(top_k)))[:2]
            rows[index, data.draw(st.integers(0, 1)), first] = rows[index, :, second][0]
    with taking(way), np.errstate(over="ignore"):  # plain Python warns where words wrap around
        found = valid_rows(rows, id_space=ids_max + 1)
        rows.flags.writeable = False
        assert valid_rows(rows, id_space=ids_max + 1).tolist() == found.tolist()
        unaligned = np.frombuffer(b"?" + rows.tobytes(), dtype, offset=1).reshape(rows.shape)
        assert valid_rows(unaligned, id_space=ids_max + 1).tolist() == found.tolist()
    assert found.tolist() == valid_by_hand(rows)


@given(rows_arrays(top_k_max=1))
def test_with_top_1_no_row_can_be_told_apart(rows: RowArray) -> None:
    assert valid_rows(rows, id_space=256).all()


def test_an_all_zero_layer_makes_its_row_invalid() -> None:
    rows = np.tile(np.array([[1, 2], [3, 4]], np.uint8), (3, 1, 1))
    rows[1, 1] = 0
    assert valid_rows(rows, id_space=8).tolist() == [True, False, True]


def test_more_picks_than_experts_cannot_be_distinct() -> None:
    rows = np.array([[[0, 1, 2]]], np.uint8)
    assert valid_rows(rows, id_space=2).tolist() == [False]


def test_rows_beyond_one_block_are_all_looked_at() -> None:
    rows = np.tile(np.arange(8, dtype=np.uint8), (20_000, 4, 1))
    bad = [0, 8_191, 8_192, 19_999]
    rows[bad, 3, 7] = 0
    valid = valid_rows(rows, id_space=8)
    assert np.flatnonzero(~valid).tolist() == bad


def layer_choice(count: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.sets(st.integers(0, count - 1), min_size=1).map(lambda ids: tuple(sorted(ids)))


@given(st.data(), st.integers(1, 6), st.integers(1, 12))
def test_scatter_puts_columns_back_by_id_with_zeros_elsewhere(
    data: st.DataObject, rows: int, num_layers: int
) -> None:
    ids = data.draw(layer_choice(num_layers))
    routed: NDArray[np.uint16] = np.arange(1, rows * len(ids) * 2 + 1, dtype=np.uint16)
    routed = routed.reshape(rows, len(ids), 2)
    rows_all = scatter_layers(routed, ids, num_layers)
    assert rows_all.shape == (rows, num_layers, 2)
    assert rows_all.dtype == np.uint16
    assert np.array_equal(select_layers(rows_all, ids), routed)
    others = [layer for layer in range(num_layers) if layer not in ids]
    assert not rows_all[:, others].any()


def test_selecting_every_layer_copies_nothing() -> None:
    rows = np.zeros((2, 3, 2), np.uint8)
    assert select_layers(rows, (0, 1, 2)) is rows
    assert select_layers(rows, (0, 2)).flags.c_contiguous


def test_a_dense_layer_in_the_middle_does_not_shift_the_next_ones() -> None:
    """verl#5037: ``i + offset`` moves every layer after a dense one."""
    rows = np.array([[[1], [3], [4]]], np.uint8)
    assert scatter_layers(rows, (1, 3, 4), 6)[0, :, 0].tolist() == [0, 1, 0, 3, 4, 0]


@pytest.mark.parametrize("ids", [(0, 3), (-1, 0)])
def test_selecting_a_layer_beyond_the_columns_is_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match=r"must lie in \[0, 3\)"):
        select_layers(np.zeros((1, 3, 2), np.uint8), ids)


@pytest.mark.parametrize("ids", [(0,), (0, 0), (0, 4), (-1, 2), (0, 1, 2)])
def test_scattering_to_ids_that_do_not_fit_is_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="layer_ids"):
        scatter_layers(np.zeros((1, 2, 2), np.uint8), ids, 4)
