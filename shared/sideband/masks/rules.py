"""Questions about kept sets, answered by whole arrays: cost grows with kept ids only.

Legend: N rows, M kept ids in all.
"""

import numpy as np
from numpy.typing import NDArray

from sideband.masks.rows import MaskRows


def starts_agree(masks: MaskRows) -> bool:
    """Whether the starts begin with 0, never run backwards and end with the number of ids."""
    starts_N = masks.starts_N
    return bool(
        starts_N.ndim == 1
        and masks.ids_M.ndim == 1
        and len(starts_N) > 0
        and starts_N[0] == 0
        and starts_N[-1] == len(masks.ids_M)
        and (starts_N[1:] >= starts_N[:-1]).all()
    )


def runs_with_ids(masks: MaskRows) -> list[tuple[int, int]]:
    """The maximal ranges [first, last) of rows that keep ids, ascending."""
    has_ids_N = masks.starts_N[1:] > masks.starts_N[:-1]
    edges = np.flatnonzero(np.diff(has_ids_N, prepend=False, append=False))
    pairs: list[list[int]] = edges.reshape(-1, 2).tolist()
    return [(first, last) for first, last in pairs]


def row_of_each_id(masks: MaskRows) -> NDArray[np.int64]:
    """For each kept id, the row that keeps it."""
    return np.repeat(np.arange(len(masks), dtype=np.int64), np.diff(masks.starts_N))


def row_of_id(masks: MaskRows, index: int) -> int:
    """The row that keeps the id at ``index``."""
    return int(np.searchsorted(masks.starts_N, index, side="right")) - 1


def first_unsorted_row(masks: MaskRows) -> int | None:
    """The first row whose ids do not strictly ascend, or None."""
    if len(masks.ids_M) < 2:
        return None
    ascends = masks.ids_M[1:] > masks.ids_M[:-1]
    inner_starts = masks.starts_N[1:-1]
    # The step over a row's boundary may go down; empty rows at either end have no such step.
    boundaries = inner_starts[(inner_starts > 0) & (inner_starts < len(masks.ids_M))]
    ascends[boundaries - 1] = True
    wrong = np.flatnonzero(~ascends)
    return row_of_id(masks, int(wrong[0]) + 1) if len(wrong) else None


def first_row_without(masks: MaskRows, token_ids_N: NDArray[np.int32]) -> int | None:
    """The first row that keeps some ids but not the token of ``token_ids_N``, or None."""
    counts = np.diff(masks.starts_N)
    is_kept = masks.ids_M == np.repeat(token_ids_N, counts)
    found = np.zeros(len(masks), np.bool_)
    found[row_of_each_id(masks)[is_kept]] = True
    missing = np.flatnonzero(~found & (counts > 0))
    return int(missing[0]) if len(missing) else None
