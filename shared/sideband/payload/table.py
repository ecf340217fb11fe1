"""The blocks of a section, found by row and looked up without a Python object for each of them."""

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sideband.payload.header import Section


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Block i holds rows [rows[i], rows[i + 1]) in the bytes [offsets[i], offsets[i + 1]).

    Arrays of Python's own: looking up one number in them makes no numpy scalar. ``loop_offsets``
    and ``loop_checksums`` are the same memory as arrays that a compiled loop takes.
    """

    rows: "array[int]"
    offsets: "array[int]"
    checksums: "array[int]"
    loop_offsets: NDArray[np.int64]
    loop_checksums: NDArray[np.uint64]

    def numbers(self, row: int, stop: int) -> range:
        """The blocks that rows [row, stop) lie in."""
        first = bisect_right(self.rows, row) - 1
        return range(first, bisect_left(self.rows, stop, first))

    def size_bytes(self, number: int) -> int:
        """Stored bytes of one block."""
        return self.offsets[number + 1] - self.offsets[number]


def block_table(section: Section, index: NDArray[np.void]) -> BlockTable:
    """The table of a section whose blocks were checked to tile it."""
    rows = array("q", bytes(8 * (len(index) + 1)))
    np.cumsum(index["rows"], out=np.frombuffer(rows, np.int64)[1:])
    offsets = array("Q", index["offset"].tobytes())
    offsets.append(section.offset + section.size_bytes)
    checksums = array("Q", index["checksum"].tobytes())
    return BlockTable(
        rows,
        offsets,
        checksums,
        loop_offsets=np.frombuffer(offsets, np.int64),
        loop_checksums=np.frombuffer(checksums, np.uint64),
    )
