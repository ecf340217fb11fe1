"""The answer that a client gets, from one leg or from two: pure.

Both forms of rows follow the same rule: ``sideband.segments`` decides for segment lists here and
for arrays in ``inline``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from services.inference_proxy.answers import Answer, Choice, MalformedAnswer, Segments
from services.inference_proxy.inline import (
    InlineRows,
    colocated_rows,
    decode_rows,
    merge_rows,
    valid_ranges,
)
from sideband.engines.forms import RoutingText, routing_text
from sideband.model import ModelShape
from sideband.segments import by_field, coverage, merge_prefill_decode

Range = tuple[int, int]


class Outcome(Struct, frozen=True, kw_only=True):
    """What the client gets, and what the proxy remembers of it."""

    body: dict[str, Any]
    token_ids: dict[int, list[int]]  # completion, by choice
    ranges: dict[int, list[Range]]  # positions with valid routing rows, by choice
    files: frozenset[str]  # named by the answer
    files_dropped: frozenset[str]  # written, and named by nothing
    has_inline: bool

    @property
    def form(self) -> str:
        """handle, inline or none: how routing rows travel."""
        if self.files:
            return "handle"
        return "inline" if self.has_inline else "none"


def from_one(
    answer: Answer,
    *,
    request_id: str,
    prompt_tokens: int,
    prompt_start: int,
    reads_rows: bool = True,
) -> Outcome:
    """The answer of one engine alone. Raises MalformedAnswer.

    Without ``reads_rows`` inline rows pass unread: nobody will train on them. Those read are
    passed on as vLLM sends them, whatever form they came in.
    """
    body = {**answer.body, "request_id": request_id, "kv_transfer_params": None}
    ranges: dict[int, list[Range]] = {}
    starts: dict[str, int] = {}
    texts: dict[int, RoutingText] = {}
    for choice in answer.choices:
        rows = None
        if reads_rows:
            rows = colocated_rows(choice, prompt_tokens=prompt_tokens, prompt_start=prompt_start)
        ranges[choice.index] = _ranges(choice.segments, rows)
        if rows is not None and rows.pos:
            starts[str(choice.index)] = rows.pos
        if rows is not None and rows.text is not choice.routed_experts:
            texts[choice.index] = rows.text
        elif isinstance(choice.routed_experts, np.ndarray):  # never JSON as it is
            texts[choice.index] = routing_text(choice.routed_experts, choice.routed_experts)
    if starts:
        body["routed_experts_start"] = starts
    if texts:
        body["choices"] = [
            {**raw, "routed_experts": texts[raw["index"]]} if raw["index"] in texts else raw
            for raw in body["choices"]
        ]
    return Outcome(
        body=body,
        token_ids={choice.index: choice.token_ids for choice in answer.choices},
        ranges=ranges,
        files=frozenset(answer.files),
        files_dropped=frozenset(),
        has_inline=answer.is_inline,
    )


def from_pair(
    prefill: Answer, decode: Answer, *, request_id: str, prompt_tokens: int, prompt_start: int
) -> Outcome:
    """Decode's answer with the rows of both legs. Raises MalformedAnswer."""
    if len(decode.choices) != 1:
        raise MalformedAnswer("choices", "must be one through prefill and decode")
    choice = decode.choices[0]
    body = {**decode.body, "request_id": request_id, "kv_transfer_params": None}
    if body.get("prompt_logprobs") is None:
        body["prompt_logprobs"] = prefill.body.get("prompt_logprobs")
    merged = merge_legs(
        prefill, decode, choice, prompt_tokens=prompt_tokens, prompt_start=prompt_start
    )
    body["choices"] = [{**decode.body["choices"][0], "routed_experts": merged.text}]
    body |= merged.members
    return Outcome(
        body=body,
        token_ids={choice.index: choice.token_ids},
        ranges={choice.index: merged.ranges},
        files=merged.files,
        files_dropped=frozenset(prefill.files | decode.files) - merged.files,
        has_inline=merged.text is not None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedRows:
    """The rows of a pair: the choice's ``routed_experts`` and members of the answer's top level."""

    text: RoutingText | None
    members: dict[str, Any]
    ranges: list[Range]
    files: frozenset[str]


def merge_legs(
    prefill: Answer,
    decode: Answer | None,
    choice: Choice,
    *,
    prompt_tokens: int,
    prompt_start: int,
) -> MergedRows:
    """The rows of ``choice`` (decode's) from both legs; without ``decode``, prefill's alone.

    Raises MalformedAnswer when the legs cannot belong to one model or one form.
    """
    first = prefill.choices[0]
    if _mixes(prefill, decode, choice):
        raise MalformedAnswer("payload_segments", "one leg answers by handle, the other inline")
    segments = tuple(
        merge_prefill_decode(first.segments, choice.segments, prompt_tokens=prompt_tokens)
    )
    _check_shapes(segments)
    rows = merge_rows(
        colocated_rows(first, prompt_tokens=prompt_tokens, prompt_start=prompt_start),
        decode_rows(choice, prompt_tokens=prompt_tokens),
        prompt_tokens=prompt_tokens,
    )
    members: dict[str, Any] = {}
    if prefill.is_by_handle or (decode is not None and decode.is_by_handle):
        members["payload_segments"] = {str(choice.index): msgspec.to_builtins(segments)}
    model = _one_model(prefill.model, decode.model if decode else None)
    if model is not None:
        members["payload_model"] = msgspec.to_builtins(model)
    if rows is not None:
        layer_ids = _one_layer_list(prefill, decode)
        if layer_ids is not None:
            members["routed_layer_ids"] = list(layer_ids)
        if rows.pos:
            members["routed_experts_start"] = {str(choice.index): rows.pos}
    return MergedRows(
        text=None if rows is None else rows.text,
        members=members,
        ranges=_ranges(segments, rows),
        files=frozenset(segment.file for segment in segments),
    )


def _ranges(segments: Segments, rows: InlineRows | None) -> list[Range]:
    routing = by_field(segments, "routed_experts")
    if len(routing) == 1:
        return [(routing[0].pos, routing[0].stop)]
    if routing:  # the writer has left invalid rows out
        return coverage(routing)
    return [] if rows is None else valid_ranges(rows)


def _mixes(prefill: Answer, decode: Answer | None, choice: Choice) -> bool:
    """Whether both legs carry rows, in different forms. A leg may carry both (the debug flag)."""
    first = prefill.choices[0]
    legs = [(prefill, first), (decode, choice)]
    forms = {
        (leg is not None and leg.is_by_handle, of.routed_experts is not None)
        for leg, of in legs
        if of.segments or of.routed_experts is not None
    }
    return len(forms) > 1


def _check_shapes(segments: Iterable[Any]) -> None:
    shapes = {(s.field, s.dtype, s.shape) for s in segments}
    if len({field for field, _, _ in shapes}) != len(shapes):
        raise MalformedAnswer("payload_segments", "the legs' rows differ in dtype or shape")


def _one_model(first: ModelShape | None, second: ModelShape | None) -> ModelShape | None:
    if first is not None and second is not None and first != second:
        raise MalformedAnswer("payload_model", "prefill and decode run different models")
    return first or second


def _one_layer_list(prefill: Answer, decode: Answer | None) -> tuple[int, ...] | None:
    legs = [leg for leg in (prefill, decode) if leg is not None and leg.is_inline]
    lists = {leg.layer_ids for leg in legs}
    if len(lists) > 1:
        raise MalformedAnswer("routed_layer_ids", "the legs' columns are different layers")
    return lists.pop() if lists else None
