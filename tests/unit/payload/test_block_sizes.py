"""A block of ours fits into the room that a reading thread keeps for one, or it is a single row."""

from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.masks.rows import MaskRows
from sideband.model import ModelShape
from sideband.payload import encodings
from sideband.payload.encodings import (
    MASK_ENCODINGS,
    ROUTING_ENCODINGS,
    mask_blocks,
    routing_blocks,
)


@pytest.mark.parametrize("name", MASK_ENCODINGS)
@given(
    counts=st.lists(st.integers(1, 40), max_size=200),
    vocab_size=st.sampled_from([1, 2, 1000, 151_936, 1 << 24]),
    target=st.integers(8, 600),
)
def test_blocks_of_kept_sets_stay_within_the_target(
    name: str, counts: list[int], vocab_size: int, target: int
) -> None:
    counts = [min(count, vocab_size) for count in counts]
    starts_N = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts_N[1:])
    ids = [np.arange(vocab_size - count, vocab_size, dtype=np.int32) for count in counts]
    masks = MaskRows(starts_N, np.concatenate([np.zeros(0, np.int32), *ids]))
    sampled_N = np.full(len(counts), vocab_size - 1, np.int32)
    encoding = MASK_ENCODINGS[name]
    with patch.object(encodings, "BLOCK_BYTES_TARGET", target):
        bounds = mask_blocks(masks, vocab_size, encoding)
    assert bounds[0] == 0
    assert bounds[-1] == len(masks)
    for first, last in pairwise(bounds):
        rows = masks.slice(first, last)
        stored = encoding.encode_block(rows, sampled_N[first:last], vocab_size)
        assert last - first == 1 or sum(map(len, stored)) <= target


@pytest.mark.parametrize("name", ROUTING_ENCODINGS)
@given(
    rows=st.integers(0, 300),
    layers=st.integers(1, 50),
    id_space=st.sampled_from([2, 256, 257, 512, 513, 1 << 16]),
    target=st.integers(8, 600),
)
def test_blocks_of_routing_stay_within_the_target(
    name: str, rows: int, layers: int, id_space: int, target: int
) -> None:
    model = ModelShape(
        num_layers=layers, layer_ids=tuple(range(layers)), top_k=1, id_space=id_space, vocab_size=1
    )
    encoding = ROUTING_ENCODINGS[name]
    with patch.object(encodings, "BLOCK_BYTES_TARGET", target):
        bounds = routing_blocks(rows, model, encoding)
    assert bounds[-1] == rows
    for first, last in pairwise(bounds):
        stored = encoding.encode_block(np.zeros((last - first, layers, 1), model.row_dtype), model)
        assert sum(map(len, stored)) == encoding.block_bytes(last - first, model)
        assert last - first == 1 or encoding.block_bytes(last - first, model) <= target
