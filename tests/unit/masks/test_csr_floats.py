"""Blocks of scores: any rows come back bit for bit; what no writer makes is refused."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.masks.csr_floats import (
    MalformedScoreBlock,
    bytes_before,
    decode_block,
    encode_block,
)
from sideband.masks.rows import ScoreRows

VOCAB = 8
Scores = list[list[float]]
LOGPROBS = st.floats(max_value=0.0, allow_nan=False, width=32)  # minus infinity too


def score_rows(scores: Scores) -> ScoreRows:
    starts = np.cumsum([0, *map(len, scores)]).astype(np.int64)
    return ScoreRows(starts, np.array([v for row in scores for v in row], np.float32))


def encoded(scores: Scores) -> bytes:
    return b"".join(part.tobytes() for part in encode_block(score_rows(scores)))


def forged(starts: list[int], values: list[float]) -> bytes:
    return struct.pack(f"<{len(starts)}I{len(values)}f", *starts, *values)


@given(scores=st.lists(st.lists(LOGPROBS, max_size=VOCAB), max_size=12))
def test_rows_come_back_bit_for_bit(scores: Scores) -> None:
    stored = encoded(scores)
    found = decode_block(memoryview(stored), len(scores), VOCAB)
    assert found.equals(score_rows(scores))
    assert bytes_before(score_rows(scores))[-1] == len(stored)


def test_a_block_is_its_starts_and_its_floats() -> None:
    assert encoded([[-0.5, -1.5], [], [0.0]]) == forged([0, 2, 2, 3], [-0.5, -1.5, 0.0])


@pytest.mark.parametrize(
    ("stored", "rows", "reason"),
    [
        (b"", 1, "must hold 1 rows"),
        (forged([0, 0], []), 2, "must hold 2 rows"),
        (forged([0, 1], [-1.0]), 1 << 40, "must hold"),
        (forged([1, 1], []), 1, "begin with 0"),
        (forged([0, 2, 1], [-1.0, -1.0]), 2, "not fall"),
        (forged([0, 9], [-1.0] * 9), 1, "over 8 values"),
        (forged([0, 1 << 31], []), 1, "over 8 values"),
        (forged([0, 2], [-1.0]), 1, "must hold 2 values"),
        (forged([0, 1], [-1.0, -1.0]), 1, "must hold 1 values"),
        (forged([0, 1], [-1.0]) + b"\0", 1, "must hold 1 values"),
        (forged([0, 0, 1], [float("nan")]), 2, "below infinity"),
        (forged([0, 1], [float("inf")]), 1, "below infinity"),
    ],
)
def test_what_no_writer_makes_is_refused(stored: bytes, rows: int, reason: str) -> None:
    with pytest.raises(MalformedScoreBlock, match=reason):
        decode_block(memoryview(stored), rows, VOCAB)


@given(stored=st.binary(max_size=64), rows=st.integers(1, 16))
def test_any_bytes_are_rows_or_refused(stored: bytes, rows: int) -> None:
    try:
        found = decode_block(memoryview(stored), rows, VOCAB)
    except MalformedScoreBlock:
        return
    assert len(found) == rows
    assert b"".join(part.tobytes() for part in encode_block(found)) == stored
    assert found.values_M.nbytes + found.starts_N.nbytes <= 2 * len(stored)
