"""Blocks of scores: any rows come back bit for bit; what no writer makes is refused."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.masks.csr_floats import (
    MalformedScoreBlock,
    bytes_before,
    decode_rows,
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


def decoded(stored: bytes, rows: int, *, first: int = 0, last: int | None = None) -> ScoreRows:
    count = (rows if last is None else last) - first
    return decode_rows(memoryview(stored), rows, VOCAB, first=first, count=count)


def forged(starts: list[int], values: list[float]) -> bytes:
    return struct.pack(f"<{len(starts)}I{len(values)}f", *starts, *values)


@given(scores=st.lists(st.lists(LOGPROBS, max_size=VOCAB), min_size=1, max_size=12), data=st.data())
def test_any_rows_come_back_bit_for_bit(scores: Scores, data: st.DataObject) -> None:
    stored = encoded(scores)
    first = data.draw(st.integers(0, len(scores) - 1))
    last = data.draw(st.integers(first + 1, len(scores)))
    found = decoded(stored, len(scores), first=first, last=last)
    assert found.equals(score_rows(scores[first:last]))
    assert found.values_M.base is None  # a few rows must not keep a whole block
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
        (forged([0, 2, 1], [-1.0, -1.0]), 2, "not run backwards"),
        (forged([0, 9], [-1.0] * 9), 1, "over 8 ids"),
        (forged([0, 1 << 31], []), 1, "over 8 ids"),
        (forged([0, 2], [-1.0]), 1, "must hold 2 values"),
        (forged([0, 1], [-1.0, -1.0]), 1, "must hold 1 values"),
        (forged([0, 1], [-1.0]) + b"\0", 1, "must hold 1 values"),
        (forged([0, 0, 1], [float("nan")]), 2, "below infinity"),
        (forged([0, 1], [float("inf")]), 1, "below infinity"),
    ],
)
def test_what_no_writer_makes_is_refused(stored: bytes, rows: int, reason: str) -> None:
    with pytest.raises(MalformedScoreBlock, match=reason):
        decoded(stored, rows)


def test_values_of_other_rows_are_not_looked_at() -> None:
    stored = forged([0, 1, 2], [float("nan"), -1.0])
    assert decoded(stored, 2, first=1).values_M.tolist() == [-1.0]
    with pytest.raises(MalformedScoreBlock, match="row is 0"):
        decoded(stored, 2, last=1)


@given(stored=st.binary(max_size=64), rows=st.integers(1, 16))
def test_any_bytes_are_rows_or_refused(stored: bytes, rows: int) -> None:
    try:
        found = decoded(stored, rows)
    except MalformedScoreBlock:
        return
    assert len(found) == rows
    assert b"".join(part.tobytes() for part in encode_block(found)) == stored
    assert found.values_M.nbytes + found.starts_N.nbytes <= 2 * len(stored)
