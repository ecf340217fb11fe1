"""What decoding holds beyond its rows is bounded, however many ids a few stored bytes stand for."""

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from sideband.masks import others_rice
from sideband.masks.errors import MalformedMaskBlock
from sideband.masks.rows import MaskRows, RaggedRows, ScoreRows
from sideband.payload.encodings import CSR_F32, MASK_ENCODINGS
from tests.unit.masks.ways import WAYS, taking

BEYOND_BYTES = 6 << 20  # 2^16 ids at once, in all arrays that a pass over them takes
VOCAB = 1 << 16
FAST_WAYS = WAYS[:2]  # the loop's own Python takes too long


def every_id(rows: int, vocab_size: int) -> MaskRows:
    ids = np.tile(np.arange(vocab_size, dtype=np.int32), rows)
    return MaskRows(np.arange(rows + 1) * vocab_size, ids)


CASES = {
    "whole vocabularies": (every_id(64, VOCAB), VOCAB),
    "one row": (every_id(1, 1 << 22), 1 << 22),
    "greedy rows": (MaskRows(np.arange((1 << 21) + 1), np.full(1 << 21, 7, np.int32)), VOCAB),
}


def peak_of(decode: Callable[[], RaggedRows[Any]], expected: RaggedRows[Any]) -> int:
    """Bytes that were held at once while the expected rows were decoded, without these."""
    tracemalloc.start()
    try:
        found = decode()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.equals(expected)
    return peak_bytes - found.starts_N.nbytes - found.values_M.nbytes


@pytest.mark.parametrize("name", MASK_ENCODINGS)
@pytest.mark.parametrize("way", FAST_WAYS)
@pytest.mark.parametrize("case", CASES)
def test_kept_sets_take_their_rows_and_no_more_than_one_copy_of_what_is_stored(
    name: str, way: str, case: str
) -> None:
    (masks, vocab_size), encoding = CASES[case], MASK_ENCODINGS[name]
    sampled_N = np.full(len(masks), 7, np.int32)
    stored = memoryview(b"".join(encoding.encode_block(masks, sampled_N, vocab_size)))
    decode = partial(encoding.decode_rows, stored, len(masks), vocab_size)
    for first in (0, len(masks) - 1):
        with taking(way):
            peak_bytes = peak_of(
                partial(decode, first=first, sampled_N=sampled_N[first:]),
                masks.slice(first, len(masks)),
            )
        assert peak_bytes < len(stored) + BEYOND_BYTES


def test_scores_take_their_rows() -> None:
    scores = ScoreRows(np.arange(65) * VOCAB, np.full(64 * VOCAB, -0.5, np.float32))
    stored = memoryview(b"".join(CSR_F32.encode_block(scores)))
    for first in (0, 63):
        decode = partial(CSR_F32.decode_rows, stored, 64, VOCAB, first=first, count=64 - first)
        assert peak_of(decode, scores.slice(first, 64)) < BEYOND_BYTES


@pytest.mark.parametrize("way", FAST_WAYS)
@pytest.mark.parametrize(
    ("rows", "stored"),
    [
        (1, b"\xff" + ((1 << 24) - 1).to_bytes(4, "little") + b"\0\1"),  # 16 M ids in one bit
        (1 << 23, bytes(1 << 23) + bytes(1 << 22)),  # rows over the limit, each a byte and a half
        (1 << 17, b"\xff" * (1 << 17) + bytes(9 << 16)),  # long counts over the limit
    ],
)
def test_counts_that_the_bytes_cannot_hold_are_refused_before_anything_is_made(
    way: str, rows: int, stored: bytes
) -> None:
    tracemalloc.start()
    try:
        with taking(way), pytest.raises(MalformedMaskBlock):
            others_rice.decode_rows(
                memoryview(stored), rows, 1 << 24, first=0, sampled_N=np.zeros(1, np.int32)
            )
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < len(stored) + (1 << 20)


def test_many_small_parts_are_gathered_in_few_objects() -> None:
    one = every_id(1, 4)
    tracemalloc.start()
    try:
        found = MaskRows.gathered(
            MaskRows(one.starts_N.copy(), one.ids_M.copy()) for _ in range(1 << 16)
        )
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.equals(every_id(1 << 16, 4))
    assert peak_bytes < 3 * (found.starts_N.nbytes + found.ids_M.nbytes)
