"""Rice codes by whole arrays: remainders at widths of their own, quotients in unary.

Legend: N rows, G gaps (one codeword each).
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sideband.masks.rows import VALUES_AT_ONCE

_WORD_BITS: Final = np.uint64(64)
_ONES_OF_BYTE: Final = np.array([byte.bit_count() for byte in range(256)], np.int64)


def widths_of(counts_N: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """Bits of a remainder in a row of so many gaps: the length of vocab_size // (2 · (count + 1)).

    That is about half of the mean gap, where the code of geometric gaps is shortest. At most 23.
    """
    # The exponent of a float is the number's length: exact, since no vocabulary has 2^53 ids.
    lengths_N = np.frexp((vocab_size // (2 * (counts_N + 1))).astype(np.float64))[1]
    return np.where(counts_N > 0, lengths_N, 0).astype(np.int64)


def pack_bits(values_G: NDArray[np.int64], widths_G: NDArray[np.int64]) -> NDArray[np.uint8]:
    """One value after the other, each at its own width of at most 32 bits, lowest bit first."""
    ends_G = np.cumsum(widths_G)
    size_bits = int(ends_G[-1]) if len(ends_G) else 0
    words = np.zeros(size_bits // 64 + 1, np.uint64)
    if size_bits:
        places_G = ends_G - widths_G
        word_G, shift_G = places_G >> 6, (places_G & 63).astype(np.uint64)
        bits_G = values_G.astype(np.uint64)
        firsts = np.flatnonzero(np.diff(word_G, prepend=-1))
        words[word_G[firsts]] = np.bitwise_or.reduceat(bits_G << shift_G, firsts)
        spills = np.flatnonzero((places_G & 63) + widths_G > 64)  # at most one for each word
        words[word_G[spills] + 1] |= bits_G[spills] >> (_WORD_BITS - shift_G[spills])
    return words.view(np.uint8)[: -(-size_bits // 8)]


def unpack_bits(
    words: NDArray[np.uint32], begin: int, widths_G: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The values from bit ``begin`` on. ``words`` hold two more than the values need."""
    ends_G = begin + np.cumsum(widths_G)
    places_G = ends_G - widths_G
    word_G = places_G >> 5
    pairs_G = words[word_G].astype(np.uint64) | words[word_G + 1].astype(np.uint64) << np.uint64(32)
    values_G: NDArray[np.int64] = (pairs_G >> (places_G & 31).astype(np.uint64)).view(np.int64)
    return values_G & ((1 << widths_G) - 1)


def unary(quotients_G: NDArray[np.int64]) -> NDArray[np.uint8]:
    """For each quotient so many zeros and a one, lowest bit first."""
    ones_G = np.cumsum(quotients_G + 1) - 1
    bits = np.zeros(int(ones_G[-1]) + 1 if len(ones_G) else 0, np.uint8)
    bits[ones_G] = 1
    return np.packbits(bits, bitorder="little")


def ones_of(stream: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The places of all ones."""
    return np.flatnonzero(np.unpackbits(stream, bitorder="little"))


def end_of_ones(stream: NDArray[np.uint8], count: int) -> int | None:
    """The place after the first ``count`` ones; None when there are fewer."""
    if count == 0:
        return 0
    for first in range(0, len(stream), VALUES_AT_ONCE):
        through = np.cumsum(_ONES_OF_BYTE[stream[first : first + VALUES_AT_ONCE]])
        if through[-1] >= count:
            byte = int(np.searchsorted(through, count))
            within = ones_of(stream[first + byte : first + byte + 1])
            before = int(through[byte - 1]) if byte else 0
            return 8 * (first + byte) + int(within[count - 1 - before]) + 1
        count -= int(through[-1])
    return None


def words_of(
    stream: NDArray[np.uint8], word: type[np.unsignedinteger[Any]], *, more: int = 0
) -> NDArray[Any]:
    """A copy of the bytes as words, the last one filled up with zeros, and ``more`` zero words."""
    words = np.zeros(-(-len(stream) // np.dtype(word).itemsize) + more, word)
    words.view(np.uint8)[: len(stream)] = stream
    return words
