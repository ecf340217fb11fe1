"""A block of ours fits into the room that a reading thread keeps for one, or it is a single row."""

from itertools import pairwise
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sideband.masks.rows import MaskRows
from sideband.payload import encodings
from sideband.payload.encodings import CSR_BITS, RAW, mask_blocks, routing_blocks


@given(
    counts=st.lists(st.integers(1, 40), max_size=200),
    vocab_size=st.sampled_from([1, 2, 1000, 151_936, 1 << 24]),
    target=st.integers(8, 600),
)
def test_blocks_of_kept_sets_stay_within_the_target(
    counts: list[int], vocab_size: int, target: int
) -> None:
    starts_N = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts_N[1:])
    masks = MaskRows(starts_N, np.zeros(starts_N[-1], np.int32))
    with patch.object(encodings, "BLOCK_BYTES_TARGET", target):
        bounds = mask_blocks(masks, vocab_size)
    assert bounds[0] == 0
    assert bounds[-1] == len(masks)
    for first, last in pairwise(bounds):
        stored = CSR_BITS.encode_block(masks.slice(first, last), vocab_size)
        assert last - first == 1 or sum(map(len, stored)) <= target


@given(rows=st.integers(0, 300), row_size=st.integers(1, 50), target=st.integers(8, 600))
def test_blocks_of_routing_stay_within_the_target(rows: int, row_size: int, target: int) -> None:
    with patch.object(encodings, "BLOCK_BYTES_TARGET", target):
        bounds = routing_blocks(rows, row_size)
    for first, last in pairwise(bounds):
        stored = RAW.encode_block(np.zeros((last - first, row_size, 1), np.uint8))
        assert last - first == 1 or sum(map(len, stored)) <= target
