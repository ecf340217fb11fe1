"""Inline answers of an engine: routing and masks of one choice, to segments and back. Pure.

A choice has P prompt and C completion tokens, N = P + C in all. The engine ran all but the last
sampled one, so its routing rows end at position N − 1 (at N when it sampled nothing); its masks
cover [P, N). A choice becomes what a payload file is written from, and inline segments are made
from that with the writer's own checks, so that inline and by handle cannot differ.

Errors: InvalidInlineRouting, InvalidInlineMask (InvalidInput).
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from sideband.engines.forms import RoutingValue, decode_routing
from sideband.engines.npy import (
    InvalidInlineRouting,
    decode_npy_base64,
    encode_npy_base64,
)
from sideband.errors import InvalidInput
from sideband.masks.rows import MaskRows
from sideband.masks.rules import first_row_without, first_unsorted_row, runs_with_ids
from sideband.model import LAYERS_MAX, ModelShape
from sideband.payload.checks import valid_runs
from sideband.payload.columns import ChoicePayload, MaskColumn, RoutingRows
from sideband.routing.rows import RowArray, select_layers
from sideband.segments import InlineSegment

__all__ = [
    "InvalidInlineMask",
    "InvalidInlineRouting",
    "RoutingValue",
    "RowArray",
    "choice_payload",
    "decode_npy_base64",
    "decode_routing",
    "decode_sampling_mask",
    "encode_npy_base64",
    "encode_sampling_mask",
    "inline_segments",
    "routing_position",
    "segments_of",
]


class InvalidInlineMask(InvalidInput):
    """An inline sampling mask that cannot be what the engine sampled from."""

    def __init__(self, value: object, rule: str) -> None:
        super().__init__("sampling_mask", value, rule)


def routing_position(
    *,
    rows: int,
    prompt_tokens: int,
    completion_tokens: int,
    prompt_start: int,
    declared: int | None = None,
) -> int:
    """The sequence position of the first of ``rows`` routing rows.

    Rows are whole or refused: they end at N − 1 (at N when nothing was sampled; an engine that
    drops that row is understood) and begin at ``prompt_start``, at 0 (the engine did not obey) or
    at P (a P/D pair without prefill's rows); where the answer has ``declared`` their position, only
    there. Any other count belongs to other tokens than these. Raises InvalidInlineRouting.
    """
    if not 0 <= prompt_start <= prompt_tokens:
        raise InvalidInlineRouting(
            f"prompt_start {prompt_start}", f"must lie in [0, {prompt_tokens}]"
        )
    tokens = prompt_tokens + completion_tokens
    stops = {tokens - 1} if completion_tokens else {tokens, tokens - 1}
    starts = {prompt_start, 0, prompt_tokens} if declared is None else {declared}
    fitting = {start for start in starts for stop in stops if stop - start == rows}
    if len(fitting) != 1:
        raise InvalidInlineRouting(
            f"{rows} rows",
            f"must fit {tokens} tokens: {tokens - 1 - prompt_start} rows from {prompt_start} on",
        )
    return fitting.pop()


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


def encode_sampling_mask(masks: MaskRows) -> list[list[int]]:
    """One choice's ``sampling_mask`` as vLLM would send these kept sets."""
    ids, starts = masks.ids_M.tolist(), masks.starts_N.tolist()
    return [ids[starts[i] : starts[i + 1]] for i in range(len(masks))]


def choice_payload(
    routed_experts: RoutingValue | None,
    sampling_mask: Sequence[Sequence[int]] | MaskRows | None,
    *,
    layer_ids: Sequence[int] | None,
    prompt_tokens: int,
    completion_token_ids: Sequence[int] | NDArray[np.int32],
    prompt_start: int,
    model: ModelShape,
    choice: int = 0,
) -> ChoicePayload:
    """One choice as a payload file is written from it, checked against ``model`` and its tokens.

    ``layer_ids`` are the answer's own columns; None means every decoder layer. Invalid rows are
    still in it. Raises InvalidInlineRouting and InvalidInlineMask.
    """
    sampled_C = _token_ids(completion_token_ids, model.vocab_size)
    masks = decode_sampling_mask(sampling_mask, vocab_size=model.vocab_size)
    if masks is not None:
        _check_members(masks, sampled_C)
    routing: RoutingRows | None = None
    if routed_experts is not None:
        columns = tuple(range(model.num_layers)) if layer_ids is None else tuple(layer_ids)
        if len(columns) > LAYERS_MAX:
            raise InvalidInlineRouting(f"{len(columns)} layers", f"must be at most {LAYERS_MAX}")
        # a bound before anything is allocated: two bytes, so that a wrong dtype is named as such
        row_bytes_max = max(model.num_layers, len(columns)) * model.top_k * 2
        tokens = prompt_tokens + len(sampled_C)
        rows_all, declared = decode_routing(routed_experts, bytes_max=tokens * row_bytes_max)
        rows = _routed_rows(rows_all, columns, model)
        pos = routing_position(
            rows=len(rows),
            prompt_tokens=prompt_tokens,
            completion_tokens=len(sampled_C),
            prompt_start=prompt_start,
            declared=declared,
        )
        routing = RoutingRows(pos=pos, rows_NLK=rows)
    column = (
        None
        if masks is None
        else MaskColumn(pos=prompt_tokens, masks=masks, sampled_token_ids_N=sampled_C)
    )
    return ChoicePayload(choice=choice, routing=routing, masks=column)


def _token_ids(token_ids: Sequence[int] | NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
    if len(token_ids) and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise InvalidInput(
            "completion_token_ids",
            f"{min(token_ids)}..{max(token_ids)}",
            f"must lie in the vocabulary [0, {vocab_size})",
        )
    return np.asarray(token_ids, np.int32)


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


def _check_members(masks: MaskRows, sampled_C: NDArray[np.int32]) -> None:
    """One row per completion token; each non-empty row holds its sampled token."""
    if len(masks) != len(sampled_C):
        raise InvalidInlineMask(
            f"{len(masks)} rows", f"must be one per completion token, {len(sampled_C)}"
        )
    row = first_row_without(masks, sampled_C)
    if row is not None:
        raise InvalidInlineMask(
            f"row {row} without its sampled token {int(sampled_C[row])}",
            "must hold the token that was sampled from it",
        )


def segments_of(payload: ChoicePayload, model: ModelShape) -> tuple[InlineSegment, ...]:
    """Inline segments of exactly the rows that a file written from ``payload`` holds.

    Invalid routing rows and kept sets without ids are gaps. Raises what the writer raises for
    routing rows.
    """
    segments: list[InlineSegment] = []
    if payload.routing is not None:
        pos, rows = payload.routing.pos, payload.routing.rows_NLK
        segments += [
            InlineSegment(field="routed_experts", pos=pos + first, data=rows[first:last])
            for first, last in valid_runs(payload.routing, model)
        ]
    if payload.masks is not None:
        pos, masks = payload.masks.pos, payload.masks.masks
        segments += [
            InlineSegment(field="sampling_mask", pos=pos + first, data=masks.slice(first, last))
            for first, last in runs_with_ids(masks)
        ]
    return tuple(segments)


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
    """One choice of an inline answer as segments. Takes and raises what ``choice_payload`` does."""
    payload = choice_payload(
        routed_experts,
        sampling_mask,
        layer_ids=layer_ids,
        prompt_tokens=prompt_tokens,
        completion_token_ids=completion_token_ids,
        prompt_start=prompt_start,
        model=model,
    )
    return segments_of(payload, model)
