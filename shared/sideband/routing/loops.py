"""The loop that checks routing rows, for ``sideband.compiled``.

Legend: M lists of ids, each of which fills a word of 64 bits.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sideband.compiled import Loop

WORD_BYTES: Final = 8
_BITS: Final = 64


def any_repeats(words_M: NDArray[np.uint64], id_bits: int) -> bool:
    """Whether a list holds an id twice. An id has 8 or 16 bits.

    A list that is turned by some of its ids and compared with itself is zero where two are equal.
    A word with a zero in it, and no other, has a highest bit of an id that subtracting ones sets.
    """
    ones = ~np.uint64(0) // ((np.uint64(1) << np.uint64(id_bits)) - np.uint64(1))
    found = np.uint64(0)
    for turn in range(id_bits, _BITS // 2 + 1, id_bits):  # half a turn: pairs have no order
        left, right = np.uint64(turn), np.uint64(_BITS - turn)
        for index in range(len(words_M)):
            word = words_M[index]
            differs = word ^ (word << left | word >> right)
            found |= (differs - ones) & ~differs
    return bool(found & (ones << np.uint64(id_bits - 1)))


# Numba takes 0.4 s to import and load what it kept, which is numpy's time for so many ids more.
ANY_REPEATS: Final = Loop[Any](
    any_repeats, "boolean(Array(uint64, 1, 'C', readonly=True), int64)", worth=1 << 30
)
