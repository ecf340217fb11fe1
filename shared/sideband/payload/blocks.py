"""The blocks that a segment lies in: which ones, and each read and verified before it is used.

A block is verified while it is still in the cache that the read put it in: verifying a whole
segment late would fetch its bytes from memory twice. Where numba is, a compiled loop does both for
all blocks of a segment; what it leaves goes the way of ``read_blocks``.
"""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from mmap import PAGESIZE
from typing import Final, NamedTuple

import numpy as np

from sideband.payload.copying import COPY_BLOCKS
from sideband.payload.errors import ChecksumMismatch, read_error
from sideband.payload.handles import OpenPayload
from sideband.payload.io import read_exactly
from sideband.payload.layout import BLOCK_BYTES_TARGET, block_checksum
from sideband.payload.table import BlockTable


class Block(NamedTuple):
    """One block that a segment needs: the rows [first, last) of it, which go to [start, stop)."""

    number: int
    rows: int
    first: int
    last: int
    start: int
    stop: int


def blocks_of(table: BlockTable, row: int, stop: int) -> Iterator[Block]:
    """The blocks of the rows [row, stop) of a section, in order."""
    for number in table.numbers(row, stop):
        begin, end = table.rows[number], table.rows[number + 1]
        first, last = max(row, begin), min(stop, end)
        yield Block(number, end - begin, first - begin, last - begin, first - row, last - row)


def read_blocks(
    payload: OpenPayload, table: BlockTable, numbers: range, stored: memoryview
) -> None:
    """Fill ``stored`` with the bytes of neighbouring blocks, each verified before the next is read.

    Raises ChecksumMismatch, PayloadTruncated, StalePayload, ReadFailed; what ``stored`` holds then
    is undefined. Between two reads as little as possible is done: a read takes 20 microseconds, and
    leaves the interpreter's own data out of the nearest caches.
    """
    fd, preadv, offsets, checksums = payload.fd, os.preadv, table.offsets, table.checksums
    start, offset = 0, offsets[numbers.start]
    for number in numbers:
        end = offsets[number + 1]
        stop = start + end - offset
        block = stored[start:stop]
        try:
            count = preadv(fd, (block,), offset)
        except OSError as exc:
            raise read_error(payload.file, exc) from exc
        if start + count != stop:  # a partial read, or the end of the file
            read_exactly(fd, [block[count:]], offset + count, file=payload.file)
        if block_checksum(block) != checksums[number]:
            raise ChecksumMismatch(payload.file, block=number, offset=offset)
        start, offset = stop, end


def _aligned_room(size_bytes: int) -> memoryview:
    """Memory that begins with a page: no vector of it lies in two lines of the caches."""
    memory = np.empty(size_bytes + PAGESIZE, np.uint8)
    start = -memory.ctypes.data % PAGESIZE
    return memory[start : start + size_bytes].data


@dataclass(slots=True, eq=False)
class _Scratch:
    """One thread's room for a block, and which verified block lies in it."""

    room: memoryview = field(default_factory=lambda: _aligned_room(BLOCK_BYTES_TARGET))
    opening: object = None
    offset: int = -1

    def holds(self, payload: OpenPayload, offset: int) -> bool:
        """Whether it is the block at ``offset`` of this opening of a file."""
        return self.opening is payload.opening and self.offset == offset


class _Scratches(threading.local):
    def __init__(self) -> None:
        self.own = _Scratch()


_SCRATCHES: Final = _Scratches()


def scratch_block(payload: OpenPayload, table: BlockTable, number: int) -> memoryview:
    """The block's bytes, verified; they are good until this thread asks for another block.

    The last block of each thread is kept, so that short segments side by side read it once. It is
    known by the opening of its file: a file that was forgotten and opened anew is read anew.
    Raises what ``read_blocks`` raises.
    """
    scratch, offset, size_bytes = _SCRATCHES.own, table.offsets[number], table.size_bytes(number)
    if size_bytes > len(scratch.room):  # a writer with other blocks than ours
        stored = memoryview(bytearray(size_bytes))
        read_blocks(payload, table, range(number, number + 1), stored)
        return stored
    stored = scratch.room[:size_bytes]
    if not scratch.holds(payload, offset):
        scratch.opening = None  # an error leaves the room half filled
        read_blocks(payload, table, range(number, number + 1), stored)
        scratch.opening, scratch.offset = payload.opening, offset
    return stored


def copy_by_loop(
    payload: OpenPayload, table: BlockTable, numbers: range, skipped: int, out: memoryview
) -> int:
    """Fill ``out`` with raw rows from byte ``skipped`` of the first block on; which block it left.

    That is ``numbers.stop`` when all is done. Blocks are left where nothing is compiled, and those
    that may have to be refused: ``read_blocks`` reads them and says why.
    """
    scratch, first, filled = _SCRATCHES.own, numbers.start, 0
    if scratch.holds(payload, table.offsets[first]):
        stored = scratch.room[skipped : table.size_bytes(first)]
        filled = min(len(stored), len(out))
        out[:filled] = stored[:filled]
        first, skipped = first + 1, 0
    if first == numbers.stop:
        return first
    loop = COPY_BLOCKS.for_items(len(out))
    if loop is None:
        return first
    scratch.opening = None
    left: int = loop(
        payload.fd,
        table.loop_offsets,
        table.loop_checksums,
        first,
        numbers.stop,
        skipped,
        np.frombuffer(scratch.room, np.uint8),
        np.frombuffer(out[filled:], np.uint8),
    )
    if left == numbers.stop:
        scratch.opening, scratch.offset = payload.opening, table.offsets[left - 1]
    return left


def verify_blocks(payload: OpenPayload, table: BlockTable) -> int:
    """Read every block of a section; how many there are. Raises what ``read_blocks`` raises."""
    for number in range(len(table.checksums)):
        stored = memoryview(bytearray(table.size_bytes(number)))
        read_blocks(payload, table, range(number, number + 1), stored)
    return len(table.checksums)
