"""The loops that check and encode kept sets, for ``sideband.compiled``. No bounds are checked.

Each says what its caller has shown, and why it then stays inside its arrays.

Legend: N rows, M ids of these rows.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sideband.compiled import Loop

NOT_KEPT_SETS: Final = -1
FOR_LOOPS: Final = ("C", "A")  # what the loops take: in one piece, aligned; they only read it


def are_kept_sets(
    starts_N: NDArray[np.int64],
    ids_M: NDArray[np.int32],
    sampled_N: NDArray[np.int32],
    vocab_size: int,
) -> bool:
    """Whether the ids of each row ascend in the vocabulary and are none or hold its sampled token.

    The caller has shown that the starts are those of the ids, and has a token for each row.
    """
    for row in range(len(sampled_N)):
        sampled, before = np.int64(sampled_N[row]), np.int64(-1)
        ascends, holds = True, bool(starts_N[row] == starts_N[row + 1])
        for index in range(starts_N[row], starts_N[row + 1]):
            value = np.int64(ids_M[index])
            ascends &= bool(value > before)
            holds |= bool(value == sampled)
            before = value
        if not (ascends and holds and before < vocab_size):
            return False
    return True


def encode_others(
    starts_N: NDArray[np.int64],
    ids_M: NDArray[np.int32],
    sampled_N: NDArray[np.int32],
    widths_N: NDArray[np.int64],
    vocab_size: int,
    remainders: NDArray[np.uint64],
    quotients: NDArray[np.uint64],
) -> int:
    """Rice codes of the ids that were not sampled, as bits of both arrays, which are zero before.

    Returns the bits of the quotients, or ``NOT_KEPT_SETS``. The caller has shown that the starts
    are those of the ids, and has room for a remainder of each id of a row but one, and for as many
    quotients that add up to the vocabulary at the row's width. A row that would need more ends it.
    """
    bit, place = np.uint64(0), np.uint64(0)
    for row in range(len(sampled_N)):
        sampled, before = np.int64(sampled_N[row]), np.int64(-1)
        width = np.uint64(widths_N[row])
        keep = (np.uint64(1) << width) - np.uint64(1)
        left = starts_N[row + 1] - starts_N[row] - 1
        for index in range(starts_N[row], starts_N[row + 1]):
            value = np.int64(ids_M[index])
            if value == sampled:
                continue
            if value <= before or value >= vocab_size or left == 0:
                return NOT_KEPT_SETS
            left -= 1
            gap = np.uint64(value - before - 1)
            before = value
            low, word, shift = gap & keep, bit >> np.uint64(6), bit & np.uint64(63)
            remainders[word] |= low << shift
            if shift + width > np.uint64(64):
                remainders[word + np.uint64(1)] |= low >> (np.uint64(64) - shift)
            bit += width
            place += gap >> width
            quotients[place >> np.uint64(6)] |= np.uint64(1) << (place & np.uint64(63))
            place += np.uint64(1)
        if left:
            return NOT_KEPT_SETS
    return int(place)


# Numba takes 0.4 s to import and load what it kept, which is numpy's time for so many ids more.
_ROWS: Final = (
    "Array(int64, 1, 'C', readonly=True), Array(int32, 1, 'C', readonly=True),"
    " Array(int32, 1, 'C', readonly=True)"
)
ARE_KEPT_SETS: Final = Loop[Any](are_kept_sets, f"boolean({_ROWS}, int64)", worth=1 << 26)
ENCODE_OTHERS: Final = Loop[Any](
    encode_others, f"int64({_ROWS}, int64[::1], int64, uint64[::1], uint64[::1])", worth=1 << 25
)
