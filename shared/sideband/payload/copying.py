"""The loop that reads blocks of raw rows: into a scratch, from there to where the rows shall lie.

A scratch stays in the caches: a read into it takes half the time of a read into other memory, and
hashing costs little beside the copy that is left to do (``sideband.payload.machine``).
"""

import os
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sideband.compiled import Loop
from sideband.payload.layout import checksum


def copy_blocks(
    fd: int,
    offsets: NDArray[np.int64],
    checksums: NDArray[np.uint64],
    first: int,
    stop: int,
    skipped: int,
    room: NDArray[np.uint8],
    out: NDArray[np.uint8],
) -> int:
    """Fill ``out`` from blocks [first, stop), from byte ``skipped`` of the first on.

    Returns the first block that did not come whole and right, or ``stop``. It does not know what is
    wrong: whoever calls it reads that block again and finds out. The caller has ``stop`` checksums
    and one offset more, ``skipped`` within the first block, and an ``out`` that ends within the
    last, so that no block leads out of an array. After ``stop`` the last block is in ``room``.
    """
    reached = 0
    for number in range(first, stop):
        offset = offsets[number]
        size = offsets[number + 1] - offset
        if size > len(room):
            return number
        block = room[:size]
        if read_into(fd, block, offset) != size:
            return number
        wanted = min(size - skipped, len(out) - reached)
        if copy_hashed(block, skipped, out[reached : reached + wanted]) != checksums[number]:
            return number
        reached += wanted
        skipped = 0
    settle()
    return stop


def read_into(fd: int, block: Any, offset: int) -> int:
    """How many bytes of the file went to ``block``; less than nothing for an error."""
    try:
        return os.preadv(fd, [block], offset)
    except OSError:
        return -1


def copy_hashed(block: Any, skipped: int, out: Any) -> int:
    """Fill ``out`` with the bytes of ``block`` from ``skipped`` on; the checksum of all of it."""
    out[:] = block[skipped : skipped + len(out)]
    return checksum(block)


def settle() -> None:
    """What was copied is there for every thread."""


def _teach() -> None:
    """Give compiled loops the three functions above, as the machine does them."""
    from numba.extending import overload

    from sideband.payload import machine

    def reading(fd: Any, block: Any, offset: Any) -> Any:
        return machine.read_into

    def copying(block: Any, skipped: Any, out: Any) -> Any:
        return machine.copy_hashed

    def settling() -> Any:
        return machine.settle

    overload(read_into)(reading)
    overload(copy_hashed)(copying)
    overload(settle)(settling)


# Who has read so much is a trainer, and reads on for days: then a second for numba is well spent.
COPY_BLOCKS: Final = Loop[Any](
    copy_blocks,
    "int64(int64, int64[::1], uint64[::1], int64, int64, int64, uint8[::1], uint8[::1])",
    worth=1 << 33,
    teach=_teach,
)
