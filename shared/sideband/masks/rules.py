"""Questions about kept sets and their scores, answered by whole arrays: cost grows with ids only.

Legend: N rows, M kept ids in all.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sideband.masks.rows import MaskRows, RaggedRows, ScoreRows
from sideband.masks.writing_loops import ARE_KEPT_SETS, FOR_LOOPS

_PLAIN_DTYPES: Final = (np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.int32))


def starts_agree(rows: RaggedRows[Any]) -> bool:
    """Whether the starts begin with 0, never run backwards and end with the number of values."""
    starts_N = rows.starts_N
    return bool(
        starts_N.ndim == 1
        and rows.values_M.ndim == 1
        and len(starts_N) > 0
        and starts_N[0] == 0
        and starts_N[-1] == len(rows.values_M)
        and (starts_N[1:] >= starts_N[:-1]).all()
    )


def runs_with_ids(masks: RaggedRows[Any]) -> list[tuple[int, int]]:
    """The maximal ranges [first, last) of rows that keep ids, ascending."""
    has_ids_N = masks.starts_N[1:] > masks.starts_N[:-1]
    edges = np.flatnonzero(np.diff(has_ids_N, prepend=False, append=False))
    pairs: list[list[int]] = edges.reshape(-1, 2).tolist()
    return [(first, last) for first, last in pairs]


def row_ranges(masks: RaggedRows[Any], size_max: int) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) that tile the rows: of at most so many rows and ids, or of one row."""
    first, count = 0, len(masks)
    while first < count:
        reached = int(masks.starts_N[first]) + size_max
        last = int(np.searchsorted(masks.starts_N, reached, side="right")) - 1
        last = min(max(last, first + 1), first + size_max, count)
        yield first, last
        first = last


def row_of_each_id(masks: RaggedRows[Any]) -> NDArray[np.int64]:
    """For each kept id, the row that keeps it."""
    return np.repeat(np.arange(len(masks), dtype=np.int64), np.diff(masks.starts_N))


def row_of_id(masks: RaggedRows[Any], index: int) -> int:
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
    if len(masks) == 1:  # it may be a whole vocabulary: no more arrays of its length than one
        is_lacking = len(masks.ids_M) > 0 and not (masks.ids_M == token_ids_N[0]).any()
        return 0 if is_lacking else None
    counts = np.diff(masks.starts_N)
    is_kept = masks.ids_M == np.repeat(token_ids_N, counts)
    found = np.zeros(len(masks), np.bool_)
    found[row_of_each_id(masks)[is_kept]] = True
    missing = np.flatnonzero(~found & (counts > 0))
    return int(missing[0]) if len(missing) else None


def first_row_with(
    masks: MaskRows, token_ids_N: NDArray[np.int32], marked_M: NDArray[np.bool_]
) -> int | None:
    """The first row whose token of ``token_ids_N`` is a kept id that is marked, or None."""
    is_sampled_M = masks.ids_M == np.repeat(token_ids_N, np.diff(masks.starts_N))
    found = np.flatnonzero(is_sampled_M & marked_M)
    return row_of_id(masks, int(found[0])) if len(found) else None


def are_kept_sets(masks: MaskRows, token_ids_N: NDArray[np.int32], *, vocab_size: int) -> bool:
    """Whether a compiled loop saw in one pass that the rows keep all rules of kept sets.

    Rows whose starts agree, with a token each. False says nothing: the questions above find out.
    """
    is_plain = (masks.starts_N.dtype, masks.ids_M.dtype, token_ids_N.dtype) == _PLAIN_DTYPES
    loop = ARE_KEPT_SETS.for_items(len(masks.ids_M)) if is_plain else None
    arrays = (masks.starts_N, masks.ids_M, token_ids_N)
    return loop is not None and loop(
        *(np.require(one, requirements=FOR_LOOPS) for one in arrays), vocab_size
    )


def first_bad_score(scores: ScoreRows) -> int | None:
    """The first row with a value that no logprob has: not a number, or infinitely likely."""
    wrong = np.flatnonzero(~(scores.values_M < np.inf))  # no comparison holds for what is no number
    return row_of_id(scores, int(wrong[0])) if len(wrong) else None


def problem_of(rows: MaskRows | ScoreRows, *, vocab_size: int) -> str | None:
    """The first rule that the values break, as "must …"; None when they keep all.

    A value of a score row may be -inf: an id that was kept and never drawn.
    """
    if isinstance(rows, ScoreRows):
        return None if first_bad_score(rows) is None else "must be numbers below infinity"
    ids_M = rows.ids_M
    if len(ids_M) and (int(ids_M.min()) < 0 or int(ids_M.max()) >= vocab_size):
        return f"must lie in [0, {vocab_size})"
    return None if first_unsorted_row(rows) is None else "must ascend, each once, within a row"
