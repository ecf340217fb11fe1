"""Kept sets and their logprobs as engines answer them in JSON: a list per completion token. Pure.

Errors: InvalidInlineMask, InvalidInlineScores (InvalidInput).

Legend: M kept ids of all rows.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from sideband.errors import InvalidInput
from sideband.masks.rows import MaskRows, ScoreRows
from sideband.masks.rules import first_bad_score, first_unsorted_row


class InvalidInlineScores(InvalidInput):
    """Inline logprobs that do not belong to the kept ids beside them."""

    def __init__(self, value: object, rule: str) -> None:
        super().__init__("sampling_mask_logprobs", value, rule)


class InvalidInlineMask(InvalidInput):
    """An inline sampling mask that cannot be what the engine sampled from."""

    def __init__(self, value: object, rule: str) -> None:
        super().__init__("sampling_mask", value, rule)


def decode_sampling_mask(
    value: Sequence[Sequence[int]] | MaskRows | None, *, vocab_size: int
) -> MaskRows | None:
    """The kept sets of one choice's ``sampling_mask``, one row per completion token.

    Ids must ascend without repeats: an engine that sends them otherwise kept something else than
    a set. None stays None, and so do rows that were decoded before. Raises InvalidInlineMask.
    """
    if value is None or isinstance(value, MaskRows):
        return value
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        raise InvalidInlineMask(type(value).__name__, "must be a list of lists of token ids")
    flat = list(chain.from_iterable(value))
    if not set(map(type, flat)) <= {int}:  # bool is refused too: true is not a token id
        raise InvalidInlineMask(
            sorted({type(each).__name__ for each in flat}), "must hold integers"
        )
    if flat and not 0 <= min(flat) <= max(flat) < vocab_size:
        raise InvalidInlineMask(
            f"ids {min(flat)}..{max(flat)}", f"must lie in the vocabulary [0, {vocab_size})"
        )
    starts_N = np.zeros(len(value) + 1, np.int64)
    np.cumsum([len(row) for row in value], out=starts_N[1:])
    masks = MaskRows(starts_N, np.array(flat, np.int32))
    row = first_unsorted_row(masks)
    if row is not None:
        raise InvalidInlineMask(value[row][:16], f"must ascend without repeats (row {row})")
    return masks


def decode_mask_logprobs(
    value: Sequence[Sequence[float | None]] | ScoreRows | None, masks: MaskRows | None
) -> NDArray[np.float32] | None:
    """One choice's ``sampling_mask_logprobs``, [M]: a number for each of its kept ids, in order.

    None stays None, and rows that were decoded before stay as they are. Raises InvalidInlineScores
    when a row has another length than the kept set, or a value that no logprob has.
    """
    scores = value if isinstance(value, ScoreRows | None) else _score_rows(value)
    if scores is None:
        return None
    if masks is None:
        raise InvalidInlineScores(f"{len(scores)} rows", "must come with a sampling_mask")
    if len(scores) != len(masks):
        raise InvalidInlineScores(f"{len(scores)} rows", f"must be one per kept set, {len(masks)}")
    differs = np.flatnonzero(np.diff(scores.starts_N) != np.diff(masks.starts_N))
    if len(differs):
        row = int(differs[0])
        raise InvalidInlineScores(
            f"row {row} of {len(scores[row])} values", f"must be one per kept id, {len(masks[row])}"
        )
    bad = first_bad_score(scores)
    if bad is not None:
        raise InvalidInlineScores(f"row {bad}", "must hold numbers below infinity")
    return scores.values_M


def _score_rows(value: Sequence[Sequence[float | None]]) -> ScoreRows:
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        raise InvalidInlineScores(type(value).__name__, "must be a list of lists of numbers")
    flat = list(chain.from_iterable(value))
    # JSON has no infinity: an engine that writes one as null says -inf.
    if not set(map(type, flat)) <= {int, float, type(None)}:
        raise InvalidInlineScores(
            sorted({type(each).__name__ for each in flat}), "must hold numbers"
        )
    starts_N = np.zeros(len(value) + 1, np.int64)
    np.cumsum([len(row) for row in value], out=starts_N[1:])
    with np.errstate(over="ignore"):  # becomes infinite, and is refused
        values = [-np.inf if each is None else each for each in flat]
        return ScoreRows(starts_N, np.array(values, np.float32))


def encode_mask_logprobs(scores: ScoreRows) -> list[list[float | None]]:
    """One choice's ``sampling_mask_logprobs``; -inf, which JSON has not, as null."""
    values = [None if value == -np.inf else value for value in scores.values_M.tolist()]
    starts = scores.starts_N.tolist()
    return [values[starts[i] : starts[i + 1]] for i in range(len(scores))]


def encode_sampling_mask(masks: MaskRows) -> list[list[int]]:
    """One choice's ``sampling_mask`` as vLLM would send these kept sets."""
    ids, starts = masks.ids_M.tolist(), masks.starts_N.tolist()
    return [ids[starts[i] : starts[i + 1]] for i in range(len(masks))]
