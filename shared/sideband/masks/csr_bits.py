"""The block encoding ``csr-bits``: 32-bit starts, then bit-packed ids. See docs/payload-format.md.

A block stands for itself: its starts count from its own first id, so any block decodes alone.

Errors: MalformedMaskBlock (InvalidInput).

Legend: N rows, M kept ids of the block.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sideband.errors import InvalidInput
from sideband.masks.bits import pack_ids, packed_bytes, unpack_ids, width_of
from sideband.masks.rows import MaskRows
from sideband.masks.rules import first_unsorted_row

START_BYTES: Final = 4


class MalformedMaskBlock(InvalidInput):
    """Bytes that no writer of this encoding makes."""

    def __init__(self, part: str, value: object, rule: str) -> None:
        super().__init__(f"mask block {part}", value, rule)


def encode_block(masks: MaskRows, vocab_size: int) -> list[NDArray[np.uint8]]:
    """The block's bytes in parts. The caller has checked the rows against the vocabulary."""
    assert len(masks.ids_M) < 1 << 32, "starts are stored in 32 bits"
    starts = masks.starts_N.astype("<u4")
    return [starts.view(np.uint8), pack_ids(masks.ids_M, width_of(vocab_size))]


def decode_block(stored: memoryview, rows: int, vocab_size: int) -> MaskRows:
    """The rows of one block, checked in full before they are returned.

    Raises MalformedMaskBlock when the sizes do not agree, starts run backwards, a row holds more
    ids than the vocabulary, ids do not ascend or lie outside it. The rows are at most 6 times
    the stored bytes, whatever those say: a start costs 4 bytes, a row is at most the vocabulary.
    """
    starts_bytes = START_BYTES * (rows + 1)
    if len(stored) < starts_bytes:
        raise MalformedMaskBlock("bytes", len(stored), f"must hold {rows} rows")
    starts_N = np.frombuffer(stored[:starts_bytes], "<u4").astype(np.int64)
    _check_starts(starts_N, vocab_size)
    width, count = width_of(vocab_size), int(starts_N[-1])
    stream = np.frombuffer(stored[starts_bytes:], np.uint8)
    if len(stream) != packed_bytes(count, width):
        raise MalformedMaskBlock("bytes", len(stored), f"must hold {count} ids of {width} bits")
    spare_bits = 8 * len(stream) - count * width
    if spare_bits and int(stream[-1]) >> (8 - spare_bits):
        raise MalformedMaskBlock("spare bits", int(stream[-1]), "must be zero")
    masks = MaskRows(starts_N, unpack_ids(stream, count, width))
    _check_ids(masks, vocab_size)
    return masks


def _check_starts(starts_N: NDArray[np.int64], vocab_size: int) -> None:
    if starts_N[0] != 0:
        raise MalformedMaskBlock("starts", int(starts_N[0]), "must begin with 0")
    counts = np.diff(starts_N)
    if counts.min(initial=0) < 0:
        raise MalformedMaskBlock("starts", int(np.argmin(counts)), "must not run backwards")
    if counts.max(initial=0) > vocab_size:
        raise MalformedMaskBlock("row", int(counts.max()), f"keeps over {vocab_size} ids")


def _check_ids(masks: MaskRows, vocab_size: int) -> None:
    if masks.ids_M.max(initial=0) >= vocab_size:
        raise MalformedMaskBlock("id", int(masks.ids_M.max()), f"must be below {vocab_size}")
    row = first_unsorted_row(masks)
    if row is not None:
        raise MalformedMaskBlock("row", row, "its ids must ascend")
