"""The block encoding ``csr-bits``: 32-bit starts, then bit-packed ids. See docs/payload-format.md.

A block stands for itself: its starts count from its own first id, so any block decodes alone, and
any rows of it without the others.

Errors: MalformedMaskBlock, TokenNotOfRow (InvalidInput).

Legend: R rows of the block, N rows wanted, M ids.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sideband.masks import loops
from sideband.masks.bits import pack_ids, packed_bytes, unpack_ids, width_of
from sideband.masks.errors import MalformedMaskBlock, TokenNotOfRow
from sideband.masks.rice import words_of
from sideband.masks.rows import VALUES_AT_ONCE, MaskRows
from sideband.masks.rules import first_row_without, first_unsorted_row, row_ranges
from sideband.masks.starts import START_BYTES, starts_of

_GROUP: Final = 8  # ids that begin and end with a byte

assert VALUES_AT_ONCE % _GROUP == 0, "a part of the ids begins with a byte"


def bytes_before(masks: MaskRows, vocab_size: int) -> NDArray[np.int64]:
    """At most so many bytes go before each row into one block, and before its end. [R + 1]

    A block has one start more than rows, and its last byte may be half full.
    """
    ids_bytes = masks.starts_N * width_of(vocab_size) // 8
    return ids_bytes + START_BYTES * np.arange(1, len(masks) + 2) + 1


def encode_block(
    masks: MaskRows, sampled_R: NDArray[np.int32], vocab_size: int
) -> list[NDArray[np.uint8]]:
    """The block's bytes in parts. The caller has checked the rows against the vocabulary."""
    assert len(masks.ids_M) < 1 << 32, "starts are stored in 32 bits"
    starts = masks.starts_N.astype("<u4")
    return [starts.view(np.uint8), pack_ids(masks.ids_M, width_of(vocab_size))]


def decode_rows(
    stored: memoryview, rows: int, vocab_size: int, *, first: int, sampled_N: NDArray[np.int32]
) -> MaskRows:
    """Rows [first, first + N) of a block of R rows, each checked to hold its sampled token.

    Sizes and starts are checked for the whole block, ids for the rows that are wanted. They are at
    most 6 times the stored bytes, whatever those say: a start costs 4 bytes, a row is at most the
    vocabulary. Raises MalformedMaskBlock, TokenNotOfRow. A row without ids has no token.
    """
    last = first + len(sampled_N)
    assert 0 <= first < last <= rows, "a row range outside the block is the caller's bug"
    starts_R = starts_of(stored, rows, vocab_size, malformed=MalformedMaskBlock)
    width, count = width_of(vocab_size), int(starts_R[-1])
    stream = np.frombuffer(stored[starts_R.nbytes :], np.uint8)
    if len(stream) != packed_bytes(count, width):
        raise MalformedMaskBlock("bytes", len(stored), f"must hold {count} ids of {width} bits")
    spare_bits = 8 * len(stream) - count * width
    if spare_bits and int(stream[-1]) >> (8 - spare_bits):
        raise MalformedMaskBlock("spare bits", int(stream[-1]), "must be zero")
    return _unpack(stream, starts_R[first : last + 1].astype(np.int64), sampled_N, vocab_size)


def _unpack(
    stream: NDArray[np.uint8],
    starts_N: NDArray[np.int64],
    sampled_N: NDArray[np.int32],
    vocab_size: int,
) -> MaskRows:
    """The rows whose ids lie at ``starts_N`` of the whole stream."""
    begin, end = int(starts_N[0]), int(starts_N[-1])
    width = width_of(vocab_size)
    skipped = begin // _GROUP * _GROUP
    stream = stream[skipped * width // 8 : packed_bytes(end, width)]
    unpack = loops.UNPACK_ROWS.for_items(end - begin)
    starts_N -= begin
    if unpack is None:
        masks = MaskRows(starts_N, _ids_of(stream, end - skipped, width)[begin - skipped :])
        _check_ids(masks, sampled_N, vocab_size)
        return masks
    ids_M = np.empty(end - begin, np.int32)
    words, sampled_N = words_of(stream, np.uint32, more=2), np.require(sampled_N, np.int32, "W")
    bit = (begin - skipped) * width
    found = unpack(words, bit, starts_N, width, sampled_N, vocab_size, ids_M)
    if found < 0:
        _check_token(-1 - found, sampled_N)
    if found == loops.ID_TOO_LARGE:
        raise MalformedMaskBlock("id", int(ids_M.max()), f"must be below {vocab_size}")
    if found:
        raise MalformedMaskBlock("row", "unsorted", "its ids must ascend")
    return MaskRows(starts_N, ids_M)


def _check_token(row: int | None, sampled_N: NDArray[np.int32]) -> None:
    if row is not None:
        raise TokenNotOfRow(row, int(sampled_N[row]))


def _ids_of(stream: NDArray[np.uint8], count: int, width: int) -> NDArray[np.int32]:
    """The first ``count`` ids of the stream."""
    ids = np.empty(count, np.int32)
    for first in range(0, count, VALUES_AT_ONCE):
        part = ids[first : first + VALUES_AT_ONCE]
        begin = first * width // 8
        end = begin + packed_bytes(len(part), width)
        part[:] = unpack_ids(stream[begin:end], len(part), width)
    return ids


def _check_ids(masks: MaskRows, sampled_N: NDArray[np.int32], vocab_size: int) -> None:
    if masks.ids_M.max(initial=0) >= vocab_size:
        raise MalformedMaskBlock("id", int(masks.ids_M.max()), f"must be below {vocab_size}")
    lacking: int | None = None
    for first, last in row_ranges(masks, VALUES_AT_ONCE):
        part = masks.slice(first, last)
        row = first_unsorted_row(part)
        if row is not None:
            raise MalformedMaskBlock("row", first + row, "its ids must ascend")
        row = first_row_without(part, sampled_N[first:last])
        if lacking is None and row is not None:
            lacking = first + row
    _check_token(lacking, sampled_N)
