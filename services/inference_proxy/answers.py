"""An engine's answer, read and checked against the request it answers: pure.

Errors: MalformedAnswer.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Struct

from services.inference_proxy.identity import ProcessName
from services.inference_proxy.limits import COMPLETION_TOKENS_MAX, TOKEN_ID_MAX
from sideband.engines.forms import RoutingValue, routing_size_bytes
from sideband.engines.long_text import LongText
from sideband.engines.vllm.processes import ENGINE_PROCESS
from sideband.errors import InvalidInput, PayloadError
from sideband.fields import FIELDS
from sideband.ids import RequestId, RunId
from sideband.model import ModelShape
from sideband.payload.paths import parse_path, version_folder
from sideband.segments import PayloadSegment

Segments = tuple[PayloadSegment, ...]
_NAMED: Final = re.compile(r"[0-9a-f]{2}/(?P<request_id>.+)-[0-9a-f]{16}\.sbp")


class _SegmentList(msgspec.Struct):
    """What a struct holds is described to the decoder once, a bare tuple at every call."""

    segments: tuple[PayloadSegment, ...]


class _TokenList(msgspec.Struct):
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, le=TOKEN_ID_MAX)]]


class MalformedAnswer(Exception):
    """An engine's answer that cannot belong to its request."""

    def __init__(self, part: str, rule: str) -> None:
        self.part, self.rule = part, rule
        super().__init__(f"{part}: {rule}")


class Expected(Struct, frozen=True, kw_only=True):
    """What an answer must agree with."""

    prompt_tokens: int
    policy_version: int
    run_id: RunId | None  # None: nothing was injected, so no segment may come
    request_id: RequestId  # the upstream one: a losing attempt's file is found by it
    choices: int = 1  # n


class Choice(Struct, frozen=True, kw_only=True):
    """One choice: its tokens, and its rows in the form the engine sent."""

    index: int
    token_ids: list[int]
    routed_experts: RoutingValue | None
    segments: Segments = ()


class Answer(Struct, frozen=True, kw_only=True):
    """A whole answer. ``body`` is the engine's own, not to be changed in place."""

    body: dict[str, Any]
    choices: tuple[Choice, ...]
    model: ModelShape | None
    layer_ids: tuple[int, ...] | None  # of inline routing; None means all decoder layers
    is_by_handle: bool
    process: str | None = None  # the engine's that gave it

    @property
    def files(self) -> set[str]:
        """The payload files that it names."""
        return {segment.file for choice in self.choices for segment in choice.segments}

    @property
    def inline_bytes(self) -> int:
        """About how many bytes its inline routing has."""
        return sum(routing_size_bytes(choice.routed_experts) for choice in self.choices)

    @property
    def is_inline(self) -> bool:
        """Whether it carries routing arrays."""
        return any(choice.routed_experts is not None for choice in self.choices)


def read_answer(body: object, expected: Expected) -> Answer:
    """Parse and check. Raises MalformedAnswer."""
    if not isinstance(body, dict):
        raise MalformedAnswer("answer", "must be a JSON object")
    raw_choices = body.get("choices")
    if not isinstance(raw_choices, list) or not raw_choices:
        raise MalformedAnswer("choices", "must be a list with at least one choice")
    segments = read_segments(body.get("payload_segments"))
    choices = tuple(_choice(raw, segments) for raw in raw_choices)
    indices = {choice.index for choice in choices}
    if indices != set(range(expected.choices)):
        raise MalformedAnswer("choices", f"must have the indices 0 to {expected.choices - 1}")
    if len(indices) != len(choices) or not segments.keys() <= indices:
        raise MalformedAnswer("choices", "each needs its own index, and segments a choice")
    for choice in choices:
        check_segments(choice.segments, len(choice.token_ids), expected)
    process = read_process(body)
    if process is not None:  # between engine and proxy: the client does not get it
        body = {name: value for name, value in body.items() if name != ENGINE_PROCESS}
    return Answer(
        body=body,
        process=process,
        choices=choices,
        model=read_model(body.get("payload_model")),
        layer_ids=read_layer_ids(body.get("routed_layer_ids")),
        is_by_handle=body.get("payload_segments") is not None,
    )


def read_process(body: Mapping[str, Any]) -> str | None:
    """``engine_process`` of an answer or an event. Raises MalformedAnswer."""
    word = body.get(ENGINE_PROCESS)
    if word is None:
        return None
    try:
        return msgspec.convert(word, ProcessName)
    except msgspec.ValidationError as exc:
        raise MalformedAnswer(ENGINE_PROCESS, str(exc)) from exc


def read_segments(value: object) -> dict[int, Segments]:
    """``payload_segments`` by choice. Raises MalformedAnswer."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedAnswer("payload_segments", "must be keyed by choice index")
    result: dict[int, Segments] = {}
    for key, raw in value.items():
        if not key.isascii() or not key.isdigit() or len(key) > 6:
            raise MalformedAnswer("payload_segments", "must be keyed by choice index")
        try:
            found = msgspec.convert({"segments": raw}, _SegmentList).segments
            result[int(key)] = tuple(segment.check() for segment in found)
        except (msgspec.ValidationError, InvalidInput) as exc:
            raise MalformedAnswer(f"payload_segments.{key}", str(exc)) from exc
    return result


def read_model(value: object) -> ModelShape | None:
    """``payload_model``, the fingerprint of what wrote the file. Raises MalformedAnswer."""
    if value is None:
        return None
    try:
        return msgspec.convert(value, ModelShape).check()
    except (msgspec.ValidationError, InvalidInput) as exc:
        raise MalformedAnswer("payload_model", str(exc)) from exc


def check_segments(segments: Segments, completion_tokens: int, expected: Expected) -> None:
    """Rows must lie where this request's tokens are, in this request's own file.

    Routing covers [0, N − 1), masks [P, N), and no row comes twice. A first position below the one
    asked for is allowed (the engine did not obey) and left to the merge. Raises MalformedAnswer.
    """
    for file in {segment.file for segment in segments}:
        _check_file(file, expected)
    tokens = expected.prompt_tokens + completion_tokens
    for segment in segments:
        field = FIELDS[segment.field]
        start, stop = field.positions(prompt_tokens=expected.prompt_tokens, tokens=tokens)
        if not start <= segment.pos < segment.stop <= stop:
            rule = f"[{segment.pos}, {segment.stop}) must lie in [{start}, {stop})"
            raise MalformedAnswer(f"payload_segments.{segment.field}", rule)
    ordered = sorted(segments, key=lambda segment: (segment.field, segment.pos))
    for one, other in pairwise(ordered):
        if one.field == other.field and one.stop > other.pos:
            raise MalformedAnswer(f"payload_segments.{one.field}", "must not overlap")


def _check_file(file: str, expected: Expected) -> None:
    if expected.run_id is None:
        raise MalformedAnswer("payload_segments", "came without a payload_dir")
    folder = f"{version_folder(expected.policy_version)}/{expected.run_id}/"
    named = _NAMED.fullmatch(file, len(folder)) if file.startswith(folder) else None
    if named is not None and named["request_id"] == expected.request_id:
        return  # as it nearly always is; what follows says what is wrong otherwise
    try:
        path = parse_path(file, run_id=expected.run_id)
    except PayloadError as exc:
        raise MalformedAnswer("payload_segments.file", str(exc)) from exc
    if path.policy_version != expected.policy_version:
        rule = f"{file} is not of v{expected.policy_version}"
        raise MalformedAnswer("payload_segments.file", rule)
    if path.request_id != expected.request_id:
        rule = f"{file} is not named by its request, {expected.request_id}"
        raise MalformedAnswer("payload_segments.file", rule)


def _choice(raw: object, segments: Mapping[int, Segments]) -> Choice:
    if not isinstance(raw, dict):
        raise MalformedAnswer("choices", "must be objects")
    index = raw.get("index")
    if type(index) is not int or index < 0:
        raise MalformedAnswer("choices.index", "must be a number from 0 on")
    return Choice(
        index=index,
        token_ids=read_token_ids(raw, index),
        routed_experts=read_routed_experts(raw, index),
        segments=segments.get(index, ()),
    )


def read_token_ids(raw: Mapping[str, Any], index: int) -> list[int]:
    """``token_ids`` of a choice; none are an empty list. Raises MalformedAnswer."""
    token_ids = raw.get("token_ids")
    if token_ids is None:
        return []
    if isinstance(token_ids, list) and len(token_ids) > COMPLETION_TOKENS_MAX:
        rule = f"has {len(token_ids)} token ids, at most {COMPLETION_TOKENS_MAX} are taken"
        raise MalformedAnswer(f"choices.{index}.token_ids", rule)
    try:
        return msgspec.convert({"token_ids": token_ids}, _TokenList).token_ids
    except msgspec.ValidationError as exc:
        rule = f"must be a list of token ids in [0, {TOKEN_ID_MAX}]"
        raise MalformedAnswer(f"choices.{index}.token_ids", rule) from exc


def read_routed_experts(raw: Mapping[str, Any], index: int) -> RoutingValue | None:
    """``routed_experts`` of a choice, not yet decoded. Raises MalformedAnswer."""
    value: RoutingValue | None = raw.get("routed_experts")
    if value is not None and not isinstance(value, (str, LongText, dict, np.ndarray)):
        raise MalformedAnswer(f"choices.{index}.routed_experts", "must be base64 or an object")
    return value


def read_layer_ids(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return msgspec.convert(value, tuple[int, ...])
    except msgspec.ValidationError as exc:
        raise MalformedAnswer("routed_layer_ids", str(exc)) from exc
