"""Rice codes of kept sets without their sampled ids, as ``others-rice`` stores them.

Legend: R rows of the block, M ids, G gaps (other ids).
"""

import numpy as np
from numpy.typing import NDArray

from sideband.masks.rice import pack_bits, unary
from sideband.masks.rows import MaskRows
from sideband.masks.writing_loops import ENCODE_OTHERS, FOR_LOOPS, NOT_KEPT_SETS

Codes = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def coded(
    masks: MaskRows, sampled_R: NDArray[np.int32], widths_R: NDArray[np.int64], vocab_size: int
) -> Codes:
    """(remainders, quotients) of rows that the caller has checked: each holds its sampled token.

    ``widths_R``: bits of a remainder.
    """
    encode = ENCODE_OTHERS.for_items(len(masks.ids_M))
    if encode is None:
        return _coded_by_arrays(masks, sampled_R, widths_R)
    starts_R = np.require(masks.starts_N, np.int64, FOR_LOOPS)
    ids_M = np.require(masks.ids_M, np.int32, FOR_LOOPS)
    counts_R = np.diff(starts_R) - 1
    assert starts_R[0] == 0, "the starts are those of the ids"
    assert starts_R[-1] == len(ids_M), "the starts are those of the ids"
    assert counts_R.min(initial=0) >= 0, "a row without ids is a gap"
    assert len(sampled_R) == len(widths_R) == len(counts_R), "one of each for each row"
    remainder_bits = int(counts_R @ widths_R)
    # Quotients of a row add up to less than the vocabulary at its width.
    quotient_bits = int(counts_R.sum() + (vocab_size >> widths_R)[counts_R > 0].sum())
    remainders, quotients = _zeros(remainder_bits), _zeros(quotient_bits)
    sampled_R = np.require(sampled_R, np.int32, FOR_LOOPS)
    found = encode(starts_R, ids_M, sampled_R, widths_R, vocab_size, remainders, quotients)
    assert found != NOT_KEPT_SETS, "every row ascends and holds its sampled token"
    return (
        remainders.view(np.uint8)[: -(-remainder_bits // 8)],
        quotients.view(np.uint8)[: -(-found // 8)],
    )


def _zeros(size_bits: int) -> NDArray[np.uint64]:
    return np.zeros(size_bits // 64 + 1, np.uint64)


def _coded_by_arrays(
    masks: MaskRows, sampled_R: NDArray[np.int32], widths_R: NDArray[np.int64]
) -> Codes:
    """The same without compiled loops."""
    counts_R = np.diff(masks.starts_N) - 1
    ids_G = masks.ids_M[masks.ids_M != np.repeat(sampled_R, counts_R + 1)].astype(np.int64)
    assert len(ids_G) == counts_R.sum(), "every row holds its sampled token, once"
    gaps_G = np.diff(ids_G, prepend=-1) - 1
    firsts = (np.cumsum(counts_R) - counts_R)[counts_R > 0]
    gaps_G[firsts] = ids_G[firsts]
    widths_G = np.repeat(widths_R, counts_R)
    return pack_bits(gaps_G & ((1 << widths_G) - 1), widths_G), unary(gaps_G >> widths_G)
