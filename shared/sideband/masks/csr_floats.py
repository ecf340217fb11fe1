"""The block encoding ``csr-f32``: 32-bit starts, then 32-bit floats. See docs/payload-format.md.

A block stands for itself: its starts count from its own first value, so any block decodes alone.

Errors: MalformedScoreBlock (InvalidInput).

Legend: R rows of the block, M values.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sideband.errors import InvalidInput
from sideband.masks.rows import ScoreRows
from sideband.masks.rules import first_bad_score

START_BYTES: Final = 4
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


def decode_block(stored: memoryview, rows: int, vocab_size: int) -> ScoreRows:
    """The rows of one block, checked in full before they are returned; they own their memory.

    Raises MalformedScoreBlock when the sizes do not agree, starts run backwards, a row holds more
    values than the vocabulary has ids, or a value is no logprob.
    """
    starts_bytes = START_BYTES * (rows + 1)
    if len(stored) < starts_bytes:
        raise MalformedScoreBlock("bytes", len(stored), f"must hold {rows} rows")
    starts_R = np.frombuffer(stored[:starts_bytes], "<u4").astype(np.int64)
    counts_R = np.diff(starts_R)
    if starts_R[0] != 0 or counts_R.min(initial=0) < 0:
        raise MalformedScoreBlock("starts", int(starts_R[0]), "must begin with 0 and not fall")
    if counts_R.max(initial=0) > vocab_size:
        raise MalformedScoreBlock("row", int(counts_R.max()), f"holds over {vocab_size} values")
    if len(stored) - starts_bytes != int(starts_R[-1]) * VALUE_BYTES:
        rule = f"must hold {int(starts_R[-1])} values"
        raise MalformedScoreBlock("bytes", len(stored), rule)
    values_M = np.frombuffer(stored[starts_bytes:], F32).astype(np.float32)
    scores = ScoreRows(starts_R, values_M)
    row = first_bad_score(scores)
    if row is not None:
        raise MalformedScoreBlock("row", row, "must hold numbers below infinity")
    return scores
