"""Bit packing against arithmetic on one long integer, at every width."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.masks.bits import pack_ids, packed_bytes, unpack_ids, width_of
from tests.unit.masks.support import A_FEW


def packed_by_hand(ids: list[int], width: int) -> bytes:
    """The page's sentence as one integer: id i in bits [i·w, (i + 1)·w)."""
    stream = sum(token_id << (index * width) for index, token_id in enumerate(ids))
    return stream.to_bytes(-(-len(ids) * width // 8), "little")


@pytest.mark.parametrize("width", range(1, 25))
@A_FEW
@given(data=st.data())
def test_ids_of_every_width_are_packed_as_the_page_says(width: int, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, (1 << width) - 1), max_size=40))
    stream = pack_ids(np.array(ids, np.int32), width)
    assert stream.tobytes() == packed_by_hand(ids, width)
    assert len(stream) == packed_bytes(len(ids), width)
    assert unpack_ids(stream, len(ids), width).tolist() == ids


@pytest.mark.parametrize("width", range(1, 25))
def test_the_largest_ids_do_not_touch_their_neighbours(width: int) -> None:
    for count in (0, 1, 7, 8, 9, 63, 64, 65, 1000):
        ids = np.full(count, (1 << width) - 1, np.int32)
        ids[1::2] = 0
        assert np.array_equal(unpack_ids(pack_ids(ids, width), count, width), ids)


@pytest.mark.parametrize(
    ("vocab_size", "width"),
    [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (256, 8), (257, 9), (151_936, 18), (1 << 24, 24)],
)
def test_the_width_is_that_of_the_largest_id(vocab_size: int, width: int) -> None:
    assert width_of(vocab_size) == width


@given(st.integers(1, 1 << 24))
def test_the_width_holds_every_id_and_no_width_below_does(vocab_size: int) -> None:
    width = width_of(vocab_size)
    assert vocab_size - 1 < 1 << width
    assert width == 1 or vocab_size - 1 >= 1 << (width - 1)


def test_packed_ids_are_contiguous_bytes() -> None:
    for width in range(1, 25):
        assert pack_ids(np.zeros(100, np.int32), width).data.c_contiguous
