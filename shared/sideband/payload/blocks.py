"""The blocks that a segment lies in: which ones, and each read and verified before it is used.

A block is verified while it is still in the cache that the read put it in: verifying a whole
segment late would fetch its bytes from memory twice.
"""

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sideband.payload.entries import entries_of
from sideband.payload.errors import ChecksumMismatch, read_error
from sideband.payload.handles import OpenPayload, OpenSection
from sideband.payload.io import read_exactly
from sideband.payload.layout import BLOCK_BYTES_TARGET, block_checksum
from sideband.segments import PayloadSegment


class Block(NamedTuple):
    """One block that a segment needs: the rows [first, last) of it, which go to [start, stop)."""

    number: int
    offset: int
    size_bytes: int
    rows: int
    checksum: int
    first: int
    last: int
    start: int
    stop: int

    is_whole: bool  # the segment wants all of its rows


def blocks_of(opened: OpenSection, segment: PayloadSegment) -> Iterator[Block]:
    """The blocks of a segment that lies within the section, in order."""
    row, stop_row = segment.row, segment.row + segment.rows
    index, end, begin = 0, 1, 0
    if len(opened.index) > 1:  # a small file has one block: nothing to look for
        bounds = opened.row_bounds
        index = bisect_right(bounds, row) - 1
        end = bisect_left(bounds, stop_row, index)
        begin = bounds[index]
    for offset, size_bytes, rows, stored_checksum in entries_of(opened.index[index:end]):
        first, last = max(row, begin), min(stop_row, begin + rows)
        yield Block(
            index,
            offset,
            size_bytes,
            rows,
            stored_checksum,
            first - begin,
            last - begin,
            first - row,
            last - row,
            last - first == rows,
        )
        begin += rows
        index += 1


def read_verified(payload: OpenPayload, block: Block, stored: memoryview) -> None:
    """Fill ``stored`` with the block's bytes.

    Raises ChecksumMismatch, PayloadTruncated, StalePayload, ReadFailed; what ``stored`` holds then
    is undefined.
    """
    try:
        count = os.preadv(payload.fd, (stored,), block.offset)
    except OSError as exc:
        raise read_error(payload.file, exc) from exc
    if count < block.size_bytes:  # a partial read, or the end of the file
        read_exactly(payload.fd, [stored[count:]], block.offset + count, file=payload.file)
    if block_checksum(stored) != block.checksum:
        raise ChecksumMismatch(payload.file, block=block.number, offset=block.offset)


@dataclass(slots=True, eq=False)
class _Scratch:
    """One thread's room for a block, and which verified block lies in it."""

    room: memoryview = field(default_factory=lambda: memoryview(bytearray(BLOCK_BYTES_TARGET)))
    opening: object = None
    offset: int = -1


class _Scratches(threading.local):
    def __init__(self) -> None:
        self.own = _Scratch()


_SCRATCHES: Final = _Scratches()


def scratch_block(payload: OpenPayload, block: Block) -> memoryview:
    """The block's bytes, verified; they are good until this thread asks for another block.

    The last block of each thread is kept, so that short segments side by side read it once. It is
    known by the opening of its file: a file that was forgotten and opened anew is read anew.
    Raises what ``read_verified`` raises.
    """
    scratch = _SCRATCHES.own
    if block.size_bytes > len(scratch.room):  # a writer with other blocks than ours
        stored = memoryview(bytearray(block.size_bytes))
        read_verified(payload, block, stored)
        return stored
    stored = scratch.room[: block.size_bytes]
    if scratch.opening is not payload.opening or scratch.offset != block.offset:
        scratch.opening = None  # an error leaves the room half filled
        read_verified(payload, block, stored)
        scratch.opening, scratch.offset = payload.opening, block.offset
    return stored


def verify_blocks(payload: OpenPayload, opened: OpenSection) -> int:
    """Read every block of the section; how many there are. Raises what ``read_verified`` raises."""
    begin = 0
    for number, (offset, size_bytes, rows, stored) in enumerate(entries_of(opened.index)):
        last = begin + rows
        block = Block(number, offset, size_bytes, rows, stored, 0, rows, begin, last, True)
        read_verified(payload, block, memoryview(bytearray(size_bytes)))
        begin = last
    return len(opened.index)
