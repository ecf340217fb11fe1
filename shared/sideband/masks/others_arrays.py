"""``loops.decode_others`` by whole arrays, some ids at a time: its own memory is bounded.

Legend: N rows, M ids of these rows; of one piece: G gaps, F rows that have some of them.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sideband.masks import loops
from sideband.masks.rice import ones_of, unpack_bits, widths_of
from sideband.masks.rows import VALUES_AT_ONCE

_FREE: Final = -1  # no id yet
_PIECE_BYTES: Final = VALUES_AT_ONCE // 8  # of quotients: each gap has one bit at least


@dataclass(slots=True, kw_only=True, eq=False)
class _Rows:
    """The rows, and how far their gaps were decoded.

    Sums run over all rows at once: what stands before a row is taken off again. ``zeros`` and
    ``sum`` are those of the last gap, ``row_zeros`` and ``row_sum`` those before its row.
    """

    counts_N: NDArray[np.uint8]
    gaps_N: NDArray[np.int64]  # before each row, and in all
    remainders: NDArray[np.uint32]
    sampled_N: NDArray[np.int32]
    vocab_size: int
    bit: int  # of the remainders
    zeros: int
    sum: int = 0
    row_zeros: int = 0
    row_sum: int = 0
    done: int = 0

    @property
    def left(self) -> int:
        """Gaps that are still to be decoded."""
        return int(self.gaps_N[-1]) - self.done

    def decode(self, ones_G: NDArray[np.int64], ids_M: NDArray[np.int32]) -> int:
        """The next gaps, given where their ones stand: each id into its place. What was found."""
        done, stop = self.done, self.done + len(ones_G)
        row = int(np.searchsorted(self.gaps_N, done, side="right")) - 1
        last = int(np.searchsorted(self.gaps_N, stop))
        rows_F = row + np.flatnonzero(self.counts_N[row:last])
        firsts_F, stops_F = self.gaps_N[rows_F], self.gaps_N[rows_F + 1]
        counts_F = np.minimum(stops_F, stop) - np.maximum(firsts_F, done)
        widths_G = np.repeat(widths_of(stops_F - firsts_F, self.vocab_size), counts_F)
        zeros = np.append(self.zeros, ones_G - np.arange(done, stop))
        sums = np.append(0, unpack_bits(self.remainders, self.bit, widths_G) + 1)
        np.cumsum(sums, out=sums)
        sums += self.sum
        before_F = np.maximum(firsts_F - done, 0)
        row_zeros_F, row_sums_F = zeros[before_F], sums[before_F]
        if firsts_F[0] < done:  # it began in the piece before
            row_zeros_F[0], row_sums_F[0] = self.row_zeros, self.row_sum
        ids_G = (zeros[1:] - np.repeat(row_zeros_F, counts_F)) << widths_G
        ids_G += sums[1:] - np.repeat(row_sums_F + 1, counts_F)
        self.done, self.bit = stop, self.bit + int(widths_G.sum())
        self.zeros, self.sum = int(zeros[-1]), int(sums[-1])
        self.row_zeros, self.row_sum = int(row_zeros_F[-1]), int(row_sums_F[-1])
        if ids_G.max() >= self.vocab_size:
            return loops.ID_TOO_LARGE
        sampled_G = np.repeat(self.sampled_N[rows_F].astype(np.int64), counts_F)
        if (ids_G == sampled_G).any():
            return loops.SAMPLED_ID_TWICE
        ids_M[np.arange(done, stop) + np.repeat(rows_F, counts_F) + (ids_G > sampled_G)] = ids_G
        return 0


def decode_others(
    counts_N: NDArray[np.uint8],
    long_counts: NDArray[np.int64],
    remainders: NDArray[np.uint32],
    bit: int,
    quotients: NDArray[np.uint8],
    begin: int,
    is_to_end: bool,
    sampled_N: NDArray[np.int32],
    vocab_size: int,
    starts_N: NDArray[np.int64],
    ids_M: NDArray[np.int32],
) -> int:
    """Fill ``starts_N`` and ``ids_M``; arguments and result are the loop's, where it has them.

    ``quotients`` are bytes, the last of which is not 0.
    """
    _fill_gaps(counts_N, long_counts, starts_N)
    rows = _Rows(
        counts_N=counts_N,
        gaps_N=starts_N,
        remainders=remainders,
        sampled_N=sampled_N,
        vocab_size=vocab_size,
        bit=bit,
        zeros=begin,
    )
    ids_M.fill(_FREE)
    for at in range(begin // 8, len(quotients), _PIECE_BYTES):
        ones = ones_of(quotients[at : at + _PIECE_BYTES]) + 8 * at
        ones = ones[np.searchsorted(ones, begin) :]
        left = rows.left
        if left and len(ones):
            found = rows.decode(ones[:left], ids_M)
            if found:
                return found
        if len(ones) > left:
            if is_to_end:
                return loops.GOES_ON
            break
    if rows.left:
        return loops.ENDS_EARLY
    _fill_starts(starts_N)
    _fill_sampled(sampled_N, ids_M)
    return 0


def _fill_gaps(
    counts_N: NDArray[np.uint8], long_counts: NDArray[np.int64], gaps_N: NDArray[np.int64]
) -> None:
    """How many gaps stand before each row, and in all."""
    gaps_N[0] = 0
    gaps_N[1:] = counts_N
    gaps_N[1:][counts_N == loops.LONG_COUNT] = long_counts
    np.cumsum(gaps_N, out=gaps_N)


def _fill_starts(gaps_N: NDArray[np.int64]) -> None:
    """Each row has a sampled id beside its others."""
    for first in range(0, len(gaps_N), VALUES_AT_ONCE):
        part = gaps_N[first : first + VALUES_AT_ONCE]
        part += np.arange(first, first + len(part))


def _fill_sampled(sampled_N: NDArray[np.int32], ids_M: NDArray[np.int32]) -> None:
    """The sampled ids go where the others of their rows, which ascend, have left one place each."""
    row = 0
    for first in range(0, len(ids_M), VALUES_AT_ONCE):
        part = ids_M[first : first + VALUES_AT_ONCE]
        places = np.flatnonzero(part == _FREE)
        part[places] = sampled_N[row : row + len(places)]
        row += len(places)
