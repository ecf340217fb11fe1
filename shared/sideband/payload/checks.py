"""What rows must be before they are written or go inline: one check for both forms.

Errors: WrongRowShape, IdOutOfRange, MalformedMask, VocabularyIdOutOfRange, UnsortedMask,
SampledTokenNotKept, MalformedScores (all PayloadRefused).
"""

import numpy as np

from sideband.masks.rows import MaskRows, ScoreRows
from sideband.masks.rules import (
    are_kept_sets,
    first_bad_score,
    first_row_with,
    first_row_without,
    first_unsorted_row,
    row_of_id,
    starts_agree,
)
from sideband.model import ModelShape
from sideband.payload.columns import MaskColumn, RoutingRows, RowArray
from sideband.payload.refusals import (
    IdOutOfRange,
    MalformedMask,
    MalformedScores,
    SampledTokenNotKept,
    UnsortedMask,
    VocabularyIdOutOfRange,
    WrongRowShape,
)
from sideband.routing.rows import valid_rows
from sideband.segments import POSITION_MAX


def valid_runs(routing: RoutingRows, model: ModelShape) -> list[tuple[int, int]]:
    """The maximal ranges [first, last) of valid rows, as indices into the rows, ascending.

    Raises WrongRowShape, IdOutOfRange: a row that cannot be the model's is refused, only a row
    that repeats ids is a gap.
    """
    _check_rows(routing, model)
    valid_N = valid_rows(routing.rows_NLK, id_space=model.id_space)
    edges = np.flatnonzero(np.diff(valid_N, prepend=False, append=False))
    pairs: list[list[int]] = edges.reshape(-1, 2).tolist()
    return [(first, last) for first, last in pairs]


def _check_rows(routing: RoutingRows, model: ModelShape) -> None:
    rows_NLK = routing.rows_NLK
    expected = (model.row_shape, model.row_dtype)
    if (rows_NLK.shape[1:], rows_NLK.dtype) != expected or rows_NLK.ndim != 3:
        found = (rows_NLK.shape[1:], rows_NLK.dtype)
        raise WrongRowShape(found=found, expected=expected)
    _check_positions(routing.pos, len(rows_NLK))
    if model.id_space <= np.iinfo(rows_NLK.dtype).max and rows_NLK.size:
        _check_id_space(routing.pos, rows_NLK, model.id_space)


def _check_id_space(pos: int, rows_NLK: RowArray, id_space: int) -> None:
    if rows_NLK.max() < id_space:
        return
    place = int(np.argmax(rows_NLK.reshape(-1) >= id_space))
    row = place // (rows_NLK.shape[1] * rows_NLK.shape[2])
    raise IdOutOfRange(pos=pos + row, expert_id=int(rows_NLK.reshape(-1)[place]), id_space=id_space)


def check_masks(column: MaskColumn, model: ModelShape) -> None:
    """Raises the error of the first rule that the kept sets break."""
    masks, pos = column.masks, column.pos
    if not starts_agree(masks):
        raise MalformedMask("its starts do not describe its ids")
    if len(column.sampled_token_ids_N) != len(masks):
        raise MalformedMask(f"{len(masks)} rows for {len(column.sampled_token_ids_N)} tokens")
    _check_positions(pos, len(masks))
    if not are_kept_sets(masks, column.sampled_token_ids_N, vocab_size=model.vocab_size):
        _check_kept_sets(column, model)
    if column.scores is not None:
        _check_scores(column, column.scores)


def _check_kept_sets(column: MaskColumn, model: ModelShape) -> None:
    masks, pos = column.masks, column.pos
    _check_vocabulary(pos, masks, model.vocab_size)
    row = first_unsorted_row(masks)
    if row is not None:
        raise UnsortedMask(pos=pos + row)
    row = first_row_without(masks, column.sampled_token_ids_N)
    if row is not None:
        token_id = int(column.sampled_token_ids_N[row])
        raise SampledTokenNotKept(pos=pos + row, token_id=token_id)


def _check_scores(column: MaskColumn, scores: ScoreRows) -> None:
    """One logprob per kept id, each a number; a token that was drawn is not impossible."""
    if not starts_agree(scores):
        rule = f"{len(scores.values_M)} logprobs for {len(column.masks.ids_M)} kept ids"
        raise MalformedScores(rule)
    row = first_bad_score(scores)
    if row is not None:
        raise MalformedScores(f"position {column.pos + row} has one that is not below infinity")
    row = first_row_with(column.masks, column.sampled_token_ids_N, np.isneginf(scores.values_M))
    if row is not None:
        raise MalformedScores(f"position {column.pos + row} gives -inf to its sampled token")


def _check_vocabulary(pos: int, masks: MaskRows, vocab_size: int) -> None:
    ids_M = masks.ids_M
    if not len(ids_M) or (ids_M.min() >= 0 and ids_M.max() < vocab_size):
        return
    index = int(np.argmax((ids_M < 0) | (ids_M >= vocab_size)))
    raise VocabularyIdOutOfRange(
        pos=pos + row_of_id(masks, index), token_id=int(ids_M[index]), vocab_size=vocab_size
    )


def _check_positions(pos: int, rows: int) -> None:
    if pos < 0 or pos + rows > POSITION_MAX:
        raise WrongRowShape(
            found=f"positions [{pos}, {pos + rows})", expected=f"within [0, {POSITION_MAX})"
        )
