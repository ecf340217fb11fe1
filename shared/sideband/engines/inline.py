"""Inline answers of an engine: routing and masks of one choice, to segments and back. Pure.

A choice has P prompt and C completion tokens, N = P + C in all. The engine ran all but the last
sampled one, so its routing rows end at position N − 1 (at N when it sampled nothing); its masks
cover [P, N). A choice becomes what a payload file is written from, and inline segments are made
from that with the writer's own checks, so that inline and by handle cannot differ.

Errors: InvalidInlineRouting, InvalidInlineMask, InvalidInlineScores (InvalidInput).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sideband.engines.forms import RoutingValue, decode_routing
from sideband.engines.masks import (
    InvalidInlineMask,
    InvalidInlineScores,
    decode_mask_logprobs,
    decode_sampling_mask,
    encode_mask_logprobs,
    encode_sampling_mask,
)
from sideband.engines.npy import (
    InvalidInlineRouting,
    decode_npy_base64,
    encode_npy_base64,
)
from sideband.errors import InvalidInput
from sideband.fields import Field
from sideband.masks.rows import MaskRows, ScoreRows
from sideband.masks.rules import (
    first_row_without,
    runs_with_ids,
)
from sideband.model import LAYERS_MAX, ModelShape
from sideband.payload.checks import valid_runs
from sideband.payload.columns import ChoicePayload, MaskColumn, RoutingRows
from sideband.routing.rows import RowArray, select_layers
from sideband.segments import InlineSegment

__all__ = [
    "InvalidInlineMask",
    "InvalidInlineRouting",
    "InvalidInlineScores",
    "RoutingValue",
    "RowArray",
    "choice_payload",
    "decode_mask_logprobs",
    "decode_npy_base64",
    "decode_routing",
    "decode_sampling_mask",
    "encode_mask_logprobs",
    "encode_npy_base64",
    "encode_sampling_mask",
    "inline_segments",
    "routing_position",
    "segments_of",
]


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
    sampling_mask_logprobs: Sequence[Sequence[float | None]] | ScoreRows | None = None,
) -> ChoicePayload:
    """One choice as a payload file is written from it, checked against ``model`` and its tokens.

    ``layer_ids`` are the answer's own columns; None means every decoder layer. Invalid rows are
    still in it. Raises InvalidInlineRouting, InvalidInlineMask and InvalidInlineScores.
    """
    sampled_C = _token_ids(completion_token_ids, model.vocab_size)
    masks = decode_sampling_mask(sampling_mask, vocab_size=model.vocab_size)
    if masks is not None:
        _check_members(masks, sampled_C)
    logprobs_M = decode_mask_logprobs(sampling_mask_logprobs, masks)
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
        else MaskColumn(
            pos=prompt_tokens, masks=masks, sampled_token_ids_N=sampled_C, logprobs_M=logprobs_M
        )
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
        column = payload.masks
        fields: list[tuple[Field, MaskRows | ScoreRows | None]] = [
            ("sampling_mask", column.masks),
            ("sampling_mask_logprobs", column.scores),
        ]
        segments += [
            InlineSegment(field=field, pos=column.pos + first, data=rows.slice(first, last))
            for field, rows in fields
            if rows is not None
            for first, last in runs_with_ids(rows)
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
    sampling_mask_logprobs: Sequence[Sequence[float | None]] | None = None,
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
        sampling_mask_logprobs=sampling_mask_logprobs,
    )
    return segments_of(payload, model)
