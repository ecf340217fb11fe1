"""Inline answers of an engine: routing and masks of one choice, to segments and back. Pure.

A choice has P prompt and C completion tokens, N = P + C in all. The engine ran all but the last
sampled one, so its routing rows end at position N − 1 (at N when it sampled nothing); its masks
cover [P, N). What the writer does with rows and masks of a file happens here too, so that
inline and by handle cannot differ: routed layers only, ids checked, invalid rows left out.

Errors: InvalidInlineRouting, InvalidInlineMask (InvalidInput).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from sideband.engines.npy import (
    InvalidInlineRouting,
    decode_npy_base64,
    encode_npy_base64,
)
from sideband.errors import InvalidInput
from sideband.masks.rows import MaskRows
from sideband.model import ModelShape
from sideband.routing.rows import RowArray, select_layers, valid_rows
from sideband.segments import InlineSegment

__all__ = [
    "InlineAnswer",
    "InvalidInlineMask",
    "InvalidInlineRouting",
    "RowArray",
    "decode_npy_base64",
    "decode_sampling_mask",
    "encode_npy_base64",
    "encode_sampling_mask",
    "inline_answer",
    "inline_segments",
    "routing_position",
]


class InvalidInlineMask(InvalidInput):
    """An inline sampling mask that cannot be what the engine sampled from."""

    def __init__(self, value: object, rule: str) -> None:
        super().__init__("sampling_mask", value, rule)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InlineAnswer:
    """What one choice carries: routed layers' rows from position ``pos`` on, and its masks.

    ``routing_NLK`` is None when the answer has none; invalid rows are still in it. Mask row i
    belongs to completion token i.
    """

    pos: int
    routing_NLK: RowArray | None
    masks: MaskRows | None


def routing_position(
    *, rows: int, prompt_tokens: int, completion_tokens: int, prompt_start: int
) -> int:
    """The sequence position of the first of ``rows`` routing rows.

    Rows are whole or refused: they end at N − 1 (at N when nothing was sampled; an engine that
    drops that row is understood) and begin at ``prompt_start``, at 0 (the engine did not obey) or
    at P (a P/D pair without prefill's rows). Any other count belongs to other tokens than these.
    Raises InvalidInlineRouting.
    """
    if not 0 <= prompt_start <= prompt_tokens:
        raise InvalidInlineRouting(
            f"prompt_start {prompt_start}", f"must lie in [0, {prompt_tokens}]"
        )
    tokens = prompt_tokens + completion_tokens
    stops = {tokens - 1} if completion_tokens else {tokens, tokens - 1}
    starts = {prompt_start, 0, prompt_tokens}
    fitting = {start for start in starts for stop in stops if stop - start == rows}
    if len(fitting) != 1:
        raise InvalidInlineRouting(
            f"{rows} rows",
            f"must fit {tokens} tokens: {tokens - 1 - prompt_start} rows from {prompt_start} on",
        )
    return fitting.pop()


def decode_sampling_mask(
    value: Sequence[Sequence[int]] | None, *, vocab_size: int
) -> MaskRows | None:
    """The kept sets of one choice's ``sampling_mask``, one row per completion token.

    Ids must ascend without repeats: an engine that sends them otherwise kept something else than
    a set. None stays None. Raises InvalidInlineMask.
    """
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        raise InvalidInlineMask(value, "must be a list of lists of token ids")
    flat = list(chain.from_iterable(value))
    if not set(map(type, flat)) <= {int}:  # bool is refused too: true is not a token id
        raise InvalidInlineMask(value, "must hold integers")
    if flat and not 0 <= min(flat) <= max(flat) < vocab_size:
        raise InvalidInlineMask(
            f"ids {min(flat)}..{max(flat)}", f"must lie in the vocabulary [0, {vocab_size})"
        )
    starts_N = np.zeros(len(value) + 1, np.int64)
    np.cumsum([len(row) for row in value], out=starts_N[1:])
    ids_M = np.array(flat, np.int32)
    descends_M = np.concatenate((np.zeros(1, np.bool_), ids_M[1:] <= ids_M[:-1]))[: len(ids_M)]
    firsts = starts_N[:-1][np.diff(starts_N) > 0]
    descends_M[firsts] = False  # rows are independent of each other
    if descends_M.any():
        row = int(np.searchsorted(starts_N, np.flatnonzero(descends_M)[0], side="right")) - 1
        raise InvalidInlineMask(value[row], f"must ascend without repeats (row {row})")
    return MaskRows(starts_N, ids_M)


def encode_sampling_mask(masks: MaskRows) -> list[list[int]]:
    """One choice's ``sampling_mask`` as vLLM would send these kept sets."""
    ids, starts = masks.ids_M.tolist(), masks.starts_N.tolist()
    return [ids[starts[i] : starts[i + 1]] for i in range(len(masks))]


def inline_answer(
    routed_experts: str | None,
    sampling_mask: Sequence[Sequence[int]] | None,
    *,
    layer_ids: Sequence[int] | None,
    prompt_tokens: int,
    completion_token_ids: Sequence[int] | NDArray[np.int32],
    prompt_start: int,
    model: ModelShape,
) -> InlineAnswer:
    """One choice's rows and masks, checked against ``model`` and the tokens they belong to.

    ``layer_ids`` are the answer's own columns; None means every decoder layer. Raises
    InvalidInlineRouting and InvalidInlineMask.
    """
    sampled_C = np.asarray(completion_token_ids, np.int64)
    masks = decode_sampling_mask(sampling_mask, vocab_size=model.vocab_size)
    if masks is not None:
        _check_members(masks, sampled_C)
    if routed_experts is None:
        return InlineAnswer(pos=0, routing_NLK=None, masks=masks)
    columns = tuple(range(model.num_layers)) if layer_ids is None else tuple(layer_ids)
    tokens = prompt_tokens + len(sampled_C)
    bytes_max = tokens * len(columns) * model.top_k * model.row_dtype.itemsize
    rows_all = decode_npy_base64(routed_experts, bytes_max=bytes_max)
    rows = _routed_rows(rows_all, columns, model)
    pos = routing_position(
        rows=len(rows),
        prompt_tokens=prompt_tokens,
        completion_tokens=len(sampled_C),
        prompt_start=prompt_start,
    )
    return InlineAnswer(pos=pos, routing_NLK=rows, masks=masks)


def _routed_rows(rows_all: RowArray, columns: tuple[int, ...], model: ModelShape) -> RowArray:
    """The routed layers' columns by layer id, range-checked."""
    if rows_all.dtype != model.row_dtype:
        # never cast: a narrower dtype has already lost ids, a wider one is another model
        raise InvalidInlineRouting(rows_all.dtype, f"must be {model.row_dtype} for this model")
    if rows_all.shape[1:] != (len(columns), model.top_k):
        raise InvalidInlineRouting(
            f"rows of {rows_all.shape[1:]}", f"must be of {(len(columns), model.top_k)}"
        )
    where = {layer: column for column, layer in enumerate(columns)}
    if len(where) != len(columns) or not set(model.layer_ids) <= set(where):
        raise InvalidInlineRouting(
            f"layers {columns}", "must be different and hold every routed layer of the model"
        )
    rows = select_layers(rows_all, [where[layer] for layer in model.layer_ids])
    if rows.size and int(rows.max()) >= model.id_space:
        raise InvalidInlineRouting(
            f"expert id {int(rows.max())}", f"must lie in the id space [0, {model.id_space})"
        )
    return rows


def _check_members(masks: MaskRows, sampled_C: NDArray[np.int64]) -> None:
    """One row per completion token; each non-empty row holds its sampled token."""
    if len(masks) != len(sampled_C):
        raise InvalidInlineMask(
            f"{len(masks)} rows", f"must be one per completion token, {len(sampled_C)}"
        )
    counts_C = np.diff(masks.starts_N)
    is_sampled_M = masks.ids_M == np.repeat(sampled_C, counts_C)
    found_C = np.add.reduceat(np.append(is_sampled_M, False), masks.starts_N[:-1], dtype=np.int64)
    missing = np.flatnonzero((counts_C > 0) & (found_C == 0))
    if len(missing):
        row = int(missing[0])
        raise InvalidInlineMask(
            f"row {row} without its sampled token {int(sampled_C[row])}",
            "must hold the token that was sampled from it",
        )


def inline_segments(
    routed_experts: str | None,
    sampling_mask: Sequence[Sequence[int]] | None,
    *,
    layer_ids: Sequence[int] | None,
    prompt_tokens: int,
    completion_token_ids: Sequence[int] | NDArray[np.int32],
    prompt_start: int,
    model: ModelShape,
) -> tuple[InlineSegment, ...]:
    """One choice as inline segments, exactly the rows that a file written from it would hold.

    Takes and raises what ``inline_answer`` does. Invalid routing rows are gaps.
    """
    answer = inline_answer(
        routed_experts,
        sampling_mask,
        layer_ids=layer_ids,
        prompt_tokens=prompt_tokens,
        completion_token_ids=completion_token_ids,
        prompt_start=prompt_start,
        model=model,
    )
    segments: list[InlineSegment] = []
    if answer.routing_NLK is not None:
        rows = answer.routing_NLK
        for start, stop in _runs(valid_rows(rows, id_space=model.id_space)):
            segments.append(
                InlineSegment(field="routed_experts", pos=answer.pos + start, data=rows[start:stop])
            )
    if answer.masks is not None and len(answer.masks):
        segments.append(InlineSegment(field="sampling_mask", pos=prompt_tokens, data=answer.masks))
    return tuple(segments)


def _runs(valid_N: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Half-open ranges of consecutive True."""
    edges = np.flatnonzero(np.diff(valid_N, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
