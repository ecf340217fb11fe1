"""The loops that decode kept sets, for ``sideband.compiled``. No bounds are checked while compiled.

Each says what its caller has checked, and why it then stays inside its arrays. Hot indices are
unsigned: a signed one may count from the end, which takes a sixth of a loop's time to ask.

Legend: N rows, M ids of these rows.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sideband.compiled import Loop, trailing_zeros

LONG_COUNT: Final = 255  # a count byte that says: in the list of long counts
# What a loop found; 0 is good.
ENDS_EARLY: Final = 1
ID_TOO_LARGE: Final = 2
SAMPLED_ID_TWICE: Final = 3
IDS_DO_NOT_ASCEND: Final = 4
GOES_ON: Final = 5


def decode_others(
    counts_N: NDArray[np.uint8],
    long_counts: NDArray[np.int64],
    long_widths: NDArray[np.int64],
    widths: NDArray[np.int64],
    remainders: NDArray[np.uint32],
    bit: Any,
    quotients: NDArray[np.uint64],
    begin: Any,
    is_to_end: bool,
    sampled_N: NDArray[np.int32],
    vocab_size: int,
    starts_N: NDArray[np.int64],
    ids_M: NDArray[np.int32],
) -> int:
    """Rows of an ``others-rice`` block: from ``bit`` of remainders and ``begin`` of quotients on.

    The caller has a long count for each count byte of 255, made M from the counts, and two words of
    ``remainders`` and one of ``quotients`` more than it needs; words of the latter are counted.
    """
    words, at = len(quotients), begin >> 6
    word = quotients[at] & (~np.uint64(0) << np.uint64(begin & 63))
    long_row, filled = 0, np.int64(0)
    for row in range(len(counts_N)):
        others = np.int64(counts_N[row])
        if others < LONG_COUNT:
            width = widths[others]
        else:
            others, width = long_counts[long_row], long_widths[long_row]
            long_row += 1
        sampled = np.int64(sampled_N[row])
        starts_N[row] = filled
        keep = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
        gaps = value = np.int64(-1)
        position, below, is_twice = begin - 1, 0, False
        for index in range(others):
            while word == 0:
                at += 1
                if at >= words:
                    return ENDS_EARLY
                word = quotients[at]
            position = at * 64 + trailing_zeros(word)
            word &= word - np.uint64(1)
            at_bit = np.uint64(bit >> 5)
            pair = np.uint64(remainders[at_bit])
            pair |= np.uint64(remainders[at_bit + np.uint64(1)]) << np.uint64(32)
            gaps += np.int64((pair >> np.uint64(bit & 31)) & keep) + 1
            bit += width
            value = (np.int64(position - begin - index) << width) + gaps
            is_above = int(value > sampled)
            ids_M[np.uint64(filled + index + is_above)] = value
            below += 1 - is_above
            is_twice |= bool(value == sampled)
        begin = position + 1
        if value >= vocab_size or is_twice:
            return ID_TOO_LARGE if value >= vocab_size else SAMPLED_ID_TWICE
        ids_M[filled + below] = sampled
        filled += others + 1
    starts_N[len(counts_N)] = filled
    return GOES_ON if is_to_end and (word != 0 or at + 2 < words) else 0


def unpack_rows(
    stream: NDArray[np.uint32],
    bit: Any,
    starts_N: NDArray[np.int64],
    width: int,
    sampled_N: NDArray[np.int32],
    vocab_size: int,
    ids_M: NDArray[np.int32],
) -> int:
    """Rows of a ``csr-bits`` block, whose ids lie from ``bit`` of ``stream`` on.

    -1 - row: the first row that keeps ids but not its sampled token. The caller has checked the
    starts, that M is their end and that ``stream`` holds two words more than M ids.
    """
    keep = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    lacking = 0
    for row in range(len(starts_N) - 1):
        sampled = np.int64(sampled_N[row])
        before, ascends = np.int64(-1), True
        holds = bool(starts_N[row] == starts_N[row + 1])
        for index in range(starts_N[row], starts_N[row + 1]):
            at_bit = np.uint64(bit >> 5)
            pair = np.uint64(stream[at_bit])
            pair |= np.uint64(stream[at_bit + np.uint64(1)]) << np.uint64(32)
            value = np.int64((pair >> np.uint64(bit & 31)) & keep)
            bit += width
            ids_M[index] = value
            ascends &= bool(value > before)
            holds |= bool(value == sampled)
            before = value
        if not ascends:
            return IDS_DO_NOT_ASCEND
        if before >= vocab_size:
            return ID_TOO_LARGE
        if not holds and lacking == 0:
            lacking = -1 - row
    return lacking


_DECODE_OTHERS: Final = (
    "int64(uint8[::1], int64[::1], int64[::1], int64[::1], uint32[::1], int64, uint64[::1], int64,"
    " boolean, int32[::1], int64, int64[::1], int32[::1])"
)
_UNPACK_ROWS: Final = "int64(uint32[::1], int64, int64[::1], int64, int32[::1], int64, int32[::1])"
# Numba takes 0.4 s to import and load what it kept, which is numpy's time for so many ids more.
DECODE_OTHERS: Final = Loop[Any](decode_others, _DECODE_OTHERS, worth=1 << 24)
UNPACK_ROWS: Final = Loop[Any](unpack_rows, _UNPACK_ROWS, worth=1 << 26)
