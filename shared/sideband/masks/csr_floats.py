"""The block encoding ``csr-f32``: 32-bit starts, then 32-bit floats. See docs/payload-format.md.

A block stands for itself: its starts count from its own first value, so any block decodes alone.

Errors: MalformedScoreBlock (InvalidInput).

Legend: R rows of the block, N rows wanted, M values.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sideband.errors import InvalidInput
from sideband.masks.rows import ScoreRows
from sideband.masks.rules import first_bad_score
from sideband.masks.starts import START_BYTES, starts_of

VALUE_BYTES: Final = 4
F32: Final = np.dtype("<f4")


class MalformedScoreBlock(InvalidInput):
    """Bytes that no writer of this encoding makes."""

    def __init__(self, part: str, value: object, rule: str) -> None:
        super().__init__(f"score block {part}", value, rule)


def bytes_before(scores: ScoreRows) -> NDArray[np.int64]:
    """Bytes that go before each row into one block, and before its end. [R + 1]

    A block has one start more than rows.
    """
    return scores.starts_N * VALUE_BYTES + START_BYTES * np.arange(1, len(scores) + 2)


def encode_block(scores: ScoreRows) -> list[NDArray[np.uint8]]:
    """The block's bytes in parts. The caller has checked the rows."""
    assert len(scores.values_M) < 1 << 32, "starts are stored in 32 bits"
    values = np.ascontiguousarray(scores.values_M, F32)
    starts = scores.starts_N.astype("<u4")
    return [part.view(np.uint8) for part in (starts, values) if len(part)]


def decode_rows(
    stored: memoryview, rows: int, vocab_size: int, *, first: int, count: int
) -> ScoreRows:
    """Rows [first, first + count) of a block of R rows; they own their memory.

    Sizes and starts are checked for the whole block, values for the rows that are wanted. Raises
    MalformedScoreBlock when the sizes do not agree, starts run backwards, a row holds more values
    than the vocabulary has ids, or a value is no logprob.
    """
    last = first + count
    assert 0 <= first < last <= rows, "a row range outside the block is the caller's bug"
    starts_R = starts_of(stored, rows, vocab_size, malformed=MalformedScoreBlock)
    values_bytes = len(stored) - starts_R.nbytes
    if values_bytes != int(starts_R[-1]) * VALUE_BYTES:
        rule = f"must hold {int(starts_R[-1])} values"
        raise MalformedScoreBlock("bytes", len(stored), rule)
    starts_N = starts_R[first : last + 1].astype(np.int64)
    wanted_M = np.frombuffer(stored[starts_R.nbytes :], F32)[starts_N[0] : starts_N[-1]]
    starts_N -= starts_N[0]
    scores = ScoreRows(starts_N, wanted_M.astype(np.float32))
    row = first_bad_score(scores)
    if row is not None:
        raise MalformedScoreBlock("row", first + row, "must hold numbers below infinity")
    return scores
