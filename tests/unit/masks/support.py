"""Kept sets as plain lists, and hypothesis strategies for them."""

from itertools import chain

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from sideband.masks.rows import MaskRows

Kept = list[list[int]]
# Every width has a smallest and a largest vocabulary; 151,936 is a public one.
VOCAB_EDGES = sorted(
    {1, 2, 3, 151_936}
    | {size for bits in range(1, 25) for size in (1 << bits, (1 << bits) + 1)} - {(1 << 24) + 1}
)
# For tests that hypothesis runs once per width or vocabulary.
A_FEW = settings(max_examples=settings().max_examples // 6)


def mask_rows(kept: Kept) -> MaskRows:
    starts = np.cumsum([0, *map(len, kept)])
    return MaskRows(starts.astype(np.int64), np.array(list(chain(*kept)), np.int32))


def lists(masks: MaskRows) -> Kept:
    return [masks[row].tolist() for row in range(len(masks))]


@st.composite
def kept_sets(draw: st.DrawFn, vocab_size: int, *, rows_max: int = 12) -> Kept:
    """Rows of every kind: empty, greedy, some ids, and the whole of a small vocabulary."""
    ids = st.integers(0, vocab_size - 1)
    row: st.SearchStrategy[list[int]] = st.one_of(
        st.just([]),
        ids.map(lambda token_id: [token_id]),
        st.sets(ids, max_size=min(vocab_size, 20)).map(sorted),
        st.just(list(range(min(vocab_size, 64)))),
    )
    return draw(st.lists(row, max_size=rows_max))
