"""Blocks of kept sets: any rows of any vocabulary come back; what no writer makes is refused."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.masks.csr_bits import MalformedMaskBlock, decode_block, encode_block
from tests.unit.masks.support import A_FEW, VOCAB_EDGES, Kept, kept_sets, lists, mask_rows
from tests.unit.masks.test_bits import packed_by_hand


def encoded(kept: Kept, vocab_size: int) -> bytes:
    return b"".join(part.tobytes() for part in encode_block(mask_rows(kept), vocab_size))


def forged(starts: list[int], ids: list[int], width: int) -> bytes:
    return struct.pack(f"<{len(starts)}I", *starts) + packed_by_hand(ids, width)


@pytest.mark.parametrize("vocab_size", VOCAB_EDGES)
@A_FEW
@given(data=st.data())
def test_rows_of_every_vocabulary_come_back(vocab_size: int, data: st.DataObject) -> None:
    kept = data.draw(kept_sets(vocab_size))
    stored = encoded(kept, vocab_size)
    found = decode_block(memoryview(stored), len(kept), vocab_size)
    assert lists(found) == kept
    assert found.ids_M.dtype == np.int32
    assert found.starts_N.dtype == np.int64


def test_a_block_is_its_starts_and_its_packed_ids() -> None:
    assert encoded([[7, 999], [], [5]], 1000) == forged([0, 2, 2, 3], [7, 999, 5], 10)


@pytest.mark.parametrize(
    ("stored", "rows", "vocab_size", "reason"),
    [
        (b"", 1, 1000, "must hold 1 rows"),
        (forged([0, 0], [], 10)[:-1], 1, 1000, "must hold 1 rows"),
        (forged([0, 1], [5], 10), 2, 1000, "must hold 2 rows"),
        (forged([0, 1], [5], 10), 1 << 40, 1000, "must hold"),
        (forged([1, 1], [], 10), 1, 1000, "begin with 0"),
        (forged([0, 2, 1], [1, 2], 10), 2, 1000, "backwards"),
        (forged([0, 1 << 31], [], 10), 1, 1000, "keeps over 1000"),
        (forged([0, 4], [0, 1, 0, 1], 1), 1, 2, "keeps over 2"),
        (forged([0, 2], [5], 10), 1, 1000, "must hold 2 ids"),
        (forged([0, 1], [5, 6, 7], 10), 1, 1000, "must hold 1 ids"),
        (forged([0, 1], [5], 10) + b"\0", 1, 1000, "must hold 1 ids"),
        (forged([0, 1], [5 | 1 << 10], 10), 1, 1000, "must be zero"),
        (forged([0, 1], [1000], 10), 1, 1000, "below 1000"),
        (forged([0, 2], [6, 5], 10), 1, 1000, "ascend"),
        (forged([0, 2], [5, 5], 10), 1, 1000, "ascend"),
        (forged([0, 1, 1, 3], [9, 6, 6], 10), 3, 1000, "ascend"),
        (forged([0, 1], [1], 1), 1, 1, "below 1"),
    ],
)
def test_what_no_writer_makes_is_refused(
    stored: bytes, rows: int, vocab_size: int, reason: str
) -> None:
    with pytest.raises(MalformedMaskBlock, match=reason):
        decode_block(memoryview(stored), rows, vocab_size)


@given(stored=st.binary(max_size=64), rows=st.integers(1, 16), bits=st.integers(1, 24))
def test_any_bytes_are_rows_or_refused(stored: bytes, rows: int, bits: int) -> None:
    vocab_size = 1 << bits
    try:
        found = decode_block(memoryview(stored), rows, vocab_size)
    except MalformedMaskBlock:
        return
    kept = lists(found)
    assert len(kept) == rows
    assert encoded(kept, vocab_size) == stored  # one form for each set of rows


@given(stored=st.binary(min_size=8, max_size=40), bits=st.integers(1, 24))
def test_rows_take_at_most_six_times_the_stored_bytes(stored: bytes, bits: int) -> None:
    rows = len(stored) // 4 - 1
    try:
        found = decode_block(memoryview(stored), rows, 1 << bits)
    except MalformedMaskBlock:
        return
    assert found.ids_M.nbytes + found.starts_N.nbytes <= 6 * len(stored)


@pytest.mark.parametrize("bits", range(1, 8))
def test_whole_vocabularies_are_the_worst_case_and_take_six_times(bits: int) -> None:
    kept = [list(range(1 << bits))] * 100
    stored = encoded(kept, 1 << bits)
    found = decode_block(memoryview(stored), 100, 1 << bits)
    assert found.ids_M.nbytes + found.starts_N.nbytes <= 6 * len(stored)
