"""The block encoding ``others-rice``: kept sets without the sampled ids (docs/payload-format.md).

The sampled token is in its kept set, and whoever reads the set has the token: it is the label of
the same row. So a row stores how many other ids it keeps and the gaps between these, Rice coded: a
gap is a quotient in unary and a remainder of a width that follows from the count. Four bits of a
hash of the sampled token stand beside each row, so that the set of another token does not pass.

Legend: R rows of the block, N rows wanted, M ids, G gaps (other ids).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sideband.masks import loops
from sideband.masks.codes import coded
from sideband.masks.errors import MalformedMaskBlock, TokenNotOfRow
from sideband.masks.loops import LONG_COUNT
from sideband.masks.others_arrays import decode_others
from sideband.masks.rice import (
    end_of_ones,
    widths_of,
    words_of,
)
from sideband.masks.rows import VALUES_AT_ONCE, MaskRows

IDS_MAX: Final = 1 << 22  # of a block of more than one row; a writer's has half as many at most
_LONG_COUNT_BYTES: Final = 4
_TAG_MULTIPLIER: Final = np.uint32(0x9E3779B1)  # 2^32 over the golden ratio spreads neighbours
_TAG_SHIFT: Final = np.uint32(28)
_FOR_LOOPS: Final = ("C", "W")  # what compiled loops take: in one piece, writable
_RULES: Final = {
    loops.ENDS_EARLY: "must hold a one for each id",
    loops.ID_TOO_LARGE: "must hold ids of the vocabulary",
    loops.SAMPLED_ID_TWICE: "must not hold a row's sampled token",
    loops.GOES_ON: "must end with the last id",
}


def tags_of(token_ids_N: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Four bits of each token."""
    return ((token_ids_N.astype(np.uint32) * _TAG_MULTIPLIER) >> _TAG_SHIFT).astype(np.uint8)


def bytes_before(masks: MaskRows, vocab_size: int) -> NDArray[np.int64]:
    """At most so many bytes go before each row into one block, and before its end. [R + 1]"""
    counts_R = np.diff(masks.starts_N) - 1
    widths_R = widths_of(counts_R, vocab_size)
    quotients_R = np.where(counts_R > 0, vocab_size >> widths_R, 0)  # gaps add up to less than it
    bits_R = 8 + 4 + counts_R * (widths_R + 1) + quotients_R
    bits_R += 8 * _LONG_COUNT_BYTES * (counts_R >= LONG_COUNT)
    before_R = np.zeros(len(masks) + 1, np.int64)
    np.cumsum(bits_R, out=before_R[1:])
    return before_R // 8 + 3  # tags, remainders and quotients each end in a byte of their own


def encode_block(
    masks: MaskRows, sampled_R: NDArray[np.int32], vocab_size: int
) -> list[NDArray[np.uint8]]:
    """The block's bytes in parts. The caller has checked the rows: each holds its sampled token."""
    counts_R = np.diff(masks.starts_N) - 1
    assert (counts_R >= 0).all(), "a row without ids is a gap"
    tags = np.append(tags_of(sampled_R), np.zeros(len(masks) % 2, np.uint8))
    return [
        np.minimum(counts_R, LONG_COUNT).astype(np.uint8),
        counts_R[counts_R >= LONG_COUNT].astype("<u4").view(np.uint8),
        tags[::2] | tags[1::2] << 4,
        *coded(masks, sampled_R, widths_of(counts_R, vocab_size), vocab_size),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Range:
    """Rows of a block: their counts, and what these say.

    ``bits`` of remainders, and the most ``zeros`` that their quotients can have.
    """

    counts: NDArray[np.uint8]
    long_counts: NDArray[np.int64]
    gaps: int
    bits: int
    zeros: int


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """A block cut into its parts, whose sizes agree with its counts."""

    vocab_size: int
    whole: _Range
    tags: NDArray[np.uint8]
    remainders: NDArray[np.uint8]
    quotients: NDArray[np.uint8]

    def range(self, first: int, last: int) -> _Range:
        """Its rows [first, last)."""
        counts, long_counts = self.whole.counts, self.whole.long_counts
        if (first, last) == (0, len(counts)):
            return self.whole
        long_first = np.count_nonzero(counts[:first] == LONG_COUNT)
        long_last = long_first + np.count_nonzero(counts[first:last] == LONG_COUNT)
        return _range(counts[first:last], long_counts[long_first:long_last], self.vocab_size)


@lru_cache(maxsize=8)
def _short_widths(vocab_size: int) -> NDArray[np.int64]:
    """The widths of rows whose count fits its byte."""
    return widths_of(np.arange(LONG_COUNT, dtype=np.int64), vocab_size)


def _range(counts: NDArray[np.uint8], long_counts: NDArray[np.int64], vocab_size: int) -> _Range:
    rows_of = _rows_of_counts(counts)[:LONG_COUNT]
    gaps_of, widths = rows_of * np.arange(LONG_COUNT), _short_widths(vocab_size)
    long_widths = widths_of(long_counts, vocab_size)
    return _Range(
        counts,
        long_counts,
        gaps=int(gaps_of.sum() + long_counts.sum()),
        bits=int(gaps_of @ widths + long_counts @ long_widths),
        zeros=int(rows_of[1:] @ (vocab_size >> widths[1:]) + (vocab_size >> long_widths).sum()),
    )


def _rows_of_counts(counts: NDArray[np.uint8]) -> NDArray[np.int64]:
    """How many rows have each count byte."""
    found = np.zeros(LONG_COUNT + 1, np.int64)
    for first in range(0, len(counts), VALUES_AT_ONCE):
        found += np.bincount(counts[first : first + VALUES_AT_ONCE], minlength=len(found))
    return found


def decode_rows(
    stored: memoryview, rows: int, vocab_size: int, *, first: int, sampled_N: NDArray[np.int32]
) -> MaskRows:
    """Rows [first, first + N) of a block of R rows, each with its sampled token in its place.

    Sizes are checked for the whole block before anything is made, ids for the rows that are
    wanted. A block decodes to at most 32 times its bytes, and to ``IDS_MAX`` ids or one row.
    Raises MalformedMaskBlock, TokenNotOfRow.
    """
    last = first + len(sampled_N)
    assert 0 <= first < last <= rows, "a row range outside the block is the caller's bug"
    block = _cut(stored, rows, vocab_size)
    _check_tokens(block, first, sampled_N)
    before, wanted = block.range(0, first), block.range(first, last)
    ids_M = np.empty(wanted.gaps + len(sampled_N), np.int32)
    masks = MaskRows(np.empty(len(sampled_N) + 1, np.int64), ids_M)
    found = _decode(block, before, wanted, masks, sampled_N, is_to_end=last == rows)
    if found:
        raise MalformedMaskBlock("ids", f"of rows [{first}, {last})", _RULES[found])
    return masks


def _cut(stored: memoryview, rows: int, vocab_size: int) -> _Block:
    """The parts of the block. Raises MalformedMaskBlock when they cannot be of so many rows."""
    data = np.frombuffer(stored, np.uint8)
    counts_R = data[:rows]
    tags_at = rows + _LONG_COUNT_BYTES * int(np.count_nonzero(counts_R == LONG_COUNT))
    remainders_at = tags_at + (rows + 1) // 2
    if len(data) < remainders_at:
        raise MalformedMaskBlock("bytes", len(data), f"must hold {rows} rows")
    # Long counts are at least 255, as their bytes are: so few are left that they may be widened.
    if rows > 1 and rows + int(counts_R.sum(dtype=np.int64)) > IDS_MAX:
        raise MalformedMaskBlock("rows", rows, f"keep over {IDS_MAX} ids")
    long_counts = data[rows:tags_at].view("<u4").astype(np.int64)
    most = int(long_counts.max(initial=0)) if len(long_counts) else int(counts_R.max())
    if most >= vocab_size:
        raise MalformedMaskBlock("row", most + 1, f"keeps over {vocab_size} ids")
    if long_counts.min(initial=LONG_COUNT) < LONG_COUNT:
        raise MalformedMaskBlock("count", int(long_counts.min()), "fits a byte")
    whole = _range(counts_R, long_counts, vocab_size)
    if rows > 1 and rows + whole.gaps > IDS_MAX:
        raise MalformedMaskBlock("rows", rows, f"keep over {IDS_MAX} ids")
    quotients_at = remainders_at + -(-whole.bits // 8)
    quotients = data[quotients_at:]
    bits = 8 * len(quotients)
    if len(data) < quotients_at or not whole.gaps <= bits < whole.gaps + whole.zeros + 8:
        raise MalformedMaskBlock("bytes", len(data), f"must hold {whole.gaps} ids")
    if (len(quotients) > 0) != (whole.gaps > 0) or (whole.gaps and not quotients[-1]):
        raise MalformedMaskBlock("bytes", len(data), "must end with the last id")
    spare_bits = 8 * (quotients_at - remainders_at) - whole.bits
    if (spare_bits and data[quotients_at - 1] >> (8 - spare_bits)) or (
        rows % 2 and data[remainders_at - 1] >> 4
    ):
        raise MalformedMaskBlock("spare bits", "set", "must be zero")
    tags, remainders = data[tags_at:remainders_at], data[remainders_at:quotients_at]
    return _Block(vocab_size, whole, tags, remainders, quotients)


def _check_tokens(block: _Block, first: int, sampled_N: NDArray[np.int32]) -> None:
    last = first + len(sampled_N)
    pairs = block.tags[first // 2 : (last + 1) // 2]
    tags_N = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[first % 2 :][: last - first]
    is_other_N = (tags_N != tags_of(sampled_N)) | (sampled_N < 0) | (sampled_N >= block.vocab_size)
    if is_other_N.any():
        row = int(is_other_N.argmax())
        raise TokenNotOfRow(row, int(sampled_N[row]))


def _decode(
    block: _Block,
    before: _Range,
    wanted: _Range,
    masks: MaskRows,
    sampled_N: NDArray[np.int32],
    *,
    is_to_end: bool,
) -> int:
    """Fill ``masks`` with the wanted rows. What is wrong with them, or 0."""
    begin = end_of_ones(block.quotients, before.gaps)
    if begin is None:
        return loops.ENDS_EARLY
    counts_N = np.require(wanted.counts, np.uint8, _FOR_LOOPS)
    sampled_N = np.require(sampled_N, np.int32, _FOR_LOOPS)
    remainders = words_of(block.remainders, np.uint32, more=2)
    decode = loops.DECODE_OTHERS.for_items(wanted.gaps)
    found: int
    if decode is None:
        found = decode_others(
            counts_N,
            wanted.long_counts,
            remainders,
            before.bits,
            block.quotients,
            begin,
            is_to_end,
            sampled_N,
            block.vocab_size,
            masks.starts_N,
            masks.ids_M,
        )
    else:
        found = decode(
            counts_N,
            wanted.long_counts,
            widths_of(wanted.long_counts, block.vocab_size),
            _short_widths(block.vocab_size),
            remainders,
            before.bits,
            words_of(block.quotients, np.uint64, more=1),
            begin,
            is_to_end,
            sampled_N,
            block.vocab_size,
            masks.starts_N,
            masks.ids_M,
        )
    return found
