"""From a turn on the wire to a ``Turn``: arrays, segments of either form, and their checks. Pure.

Legend: P prompt and C completion tokens, N = P + C.

Errors: RolloutRefused and its kinds (``errors.py``); each names the turn.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from services.kit.turns import TurnWire
from services.orchestrator.errors import (
    InvalidInline,
    InvalidSegment,
    MalformedTurn,
    ModelMismatch,
    NoModel,
    OverlappingSegments,
)
from services.orchestrator.limits import SEGMENTS_PER_TURN_MAX, TOKENS_PER_TURN_MAX
from sideband.batch.columns import Runs
from sideband.batch.types import Turn
from sideband.engines.inline import inline_segments
from sideband.errors import InvalidInput, PayloadError
from sideband.fields import FIELDS
from sideband.ids import RequestId, RunId
from sideband.model import ModelShape
from sideband.payload.paths import fan_out, parse_path
from sideband.segments import AnySegment, PayloadSegment


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRules:
    """What turns of one rollout must agree with. ``policy_version`` is the lease's."""

    run_id: RunId
    policy_version: int
    model: ModelShape | None
    has_root: bool


def read_turn(name: str, wire: TurnWire, rules: TurnRules) -> Turn:
    """The turn, fully checked; ``name`` is its place in the body."""
    prompt_P = _array(name, "prompt_token_ids", wire.prompt_token_ids, np.dtype("<i4"))
    completion_C = _array(name, "completion_token_ids", wire.completion_token_ids, np.dtype("<i4"))
    tokens = len(prompt_P) + len(completion_C)
    if not 1 <= len(prompt_P) <= tokens <= TOKENS_PER_TURN_MAX:
        raise MalformedTurn(
            f"{name} must hold at least one prompt token and at most {TOKENS_PER_TURN_MAX} tokens."
        )
    vocab_size = rules.model.vocab_size if rules.model else 1 << 31
    for field, ids in (("prompt_token_ids", prompt_P), ("completion_token_ids", completion_C)):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise MalformedTurn(f"{name}.{field} must lie in the vocabulary [0, {vocab_size}).")
    return Turn(
        request_id=RequestId(wire.request_id),
        prompt_token_ids_P=prompt_P,
        completion_token_ids_C=completion_C,
        logprobs_C=_column(name, "logprobs", wire.logprobs, "<f4", completion_C),
        sampled_C=_sampled(name, wire.sampled, completion_C),
        temperature=_temperature(name, wire.temperature),
        is_truncating=_is_truncating(name, wire),
        segments=_segments(name, wire, rules, prompt_P, completion_C),
        weight_versions_C=None
        if wire.weight_versions is None
        else Runs.of(_column(name, "weight_versions", wire.weight_versions, "<i4", completion_C)),
        advantages_C=None
        if wire.advantages is None
        else _column(name, "advantages", wire.advantages, "<f4", completion_C),
    )


def _array(name: str, field: str, data: bytes, dtype: np.dtype[np.int32]) -> NDArray[np.int32]:
    if len(data) % dtype.itemsize:
        raise MalformedTurn(f"{name}.{field} must be whole {dtype.itemsize}-byte values.")
    return np.frombuffer(data, dtype)


def _column(
    name: str, field: str, data: bytes, dtype: str, completion_C: NDArray[np.int32]
) -> NDArray[np.float32]:
    if len(data) != 4 * len(completion_C):
        raise MalformedTurn(
            f"{name}.{field} must hold {len(completion_C)} values, one per completion token."
        )
    column_C: NDArray[np.float32] = np.frombuffer(data, np.dtype(dtype))
    if dtype == "<f4" and not np.isfinite(column_C).all():
        raise MalformedTurn(f"{name}.{field} must be finite.")
    return column_C


def _sampled(name: str, data: bytes | None, completion_C: NDArray[np.int32]) -> NDArray[np.bool_]:
    if data is None:
        return np.ones(len(completion_C), np.bool_)
    if len(data) != len(completion_C) or set(data) - {0, 1}:
        raise MalformedTurn(f"{name}.sampled must hold 0 or 1 per completion token.")
    return np.frombuffer(data, np.bool_)


def _temperature(name: str, value: float) -> float:
    if not (np.isfinite(value) and value >= 0):
        raise MalformedTurn(f"{name}.temperature must be finite and not negative.")
    return value


def _is_truncating(name: str, wire: TurnWire) -> bool:
    """Whether sampling cut the vocabulary, so that a trained token without a mask is a fault."""
    if not 0 < wire.top_p <= 1:
        raise MalformedTurn(f"{name}.top_p must lie in (0, 1].")
    if wire.top_k is not None and wire.top_k < -1:
        raise MalformedTurn(f"{name}.top_k must be at least 1, or 0 or -1 for no limit.")
    return wire.top_p < 1 or (wire.top_k is not None and wire.top_k > 0)


def _segments(
    name: str,
    wire: TurnWire,
    rules: TurnRules,
    prompt_P: NDArray[np.int32],
    completion_C: NDArray[np.int32],
) -> tuple[AnySegment, ...]:
    inline = (wire.routed_experts, wire.sampling_mask, wire.sampling_mask_logprobs)
    is_inline = any(rows is not None for rows in inline)
    if wire.payload_segments and is_inline:
        raise InvalidSegment(f"{name} carries rows inline and by handle.")
    if not wire.payload_segments and not is_inline:
        return ()
    if rules.model is None:
        raise NoModel(f"{name} carries rows, but the run has no model config.")
    if wire.payload_model is not None and wire.payload_model != rules.model:
        raise ModelMismatch(f"{name} is of model {wire.payload_model}, the run has {rules.model}.")
    if wire.payload_segments:
        return _handles(name, wire.payload_segments, rules, len(prompt_P), len(completion_C))
    try:
        return inline_segments(
            wire.routed_experts,
            wire.sampling_mask,
            layer_ids=wire.routed_layer_ids,
            prompt_tokens=len(prompt_P),
            completion_token_ids=completion_C,
            prompt_start=wire.routed_experts_prompt_start,
            model=rules.model,
            sampling_mask_logprobs=wire.sampling_mask_logprobs,
        )
    except (InvalidInput, PayloadError) as exc:
        raise InvalidInline(f"{name}: {exc}") from exc


def _handles(
    name: str,
    segments: list[PayloadSegment],
    rules: TurnRules,
    prompt_tokens: int,
    completion_tokens: int,
) -> tuple[PayloadSegment, ...]:
    if not rules.has_root:
        raise InvalidSegment(f"{name} comes by handle, but the run has no payload root.")
    if len(segments) > SEGMENTS_PER_TURN_MAX:
        raise InvalidSegment(f"{name} has over {SEGMENTS_PER_TURN_MAX} segments.")
    tokens = prompt_tokens + completion_tokens
    for place, segment in enumerate(segments):
        where = f"{name}.payload_segments[{place}]"
        try:
            segment.check()
        except InvalidInput as exc:
            raise InvalidSegment(f"{where}: {exc}") from exc
        problem = file_problem(segment.file, rules.run_id, rules.policy_version)
        if problem:
            raise InvalidSegment(f"{where}: {problem}", file=segment.file)
        _check_shape(where, segment, rules.model)
        field = FIELDS[segment.field]
        first, stop = field.positions(prompt_tokens=prompt_tokens, tokens=tokens)
        if segment.pos < first or segment.stop > stop:
            raise InvalidSegment(
                f"{where}: rows [{segment.pos}, {segment.stop}) must lie in [{first}, {stop}) of "
                f"{prompt_tokens} prompt and {completion_tokens} completion tokens."
            )
    _check_disjoint(name, segments)
    return tuple(sorted(segments, key=lambda segment: (segment.field, segment.pos)))


def _check_shape(where: str, segment: PayloadSegment, model: ModelShape | None) -> None:
    assert model is not None, "rows without a model were refused before"
    expected = FIELDS[segment.field].kind(model)
    if (segment.dtype, segment.shape) != expected:
        raise InvalidSegment(
            f"{where}: rows are {segment.dtype} {segment.shape}, the model has {expected}."
        )


def _check_disjoint(name: str, segments: list[PayloadSegment]) -> None:
    ordered = sorted(segments, key=lambda segment: (segment.field, segment.pos))
    for before, after in pairwise(ordered):
        if before.field == after.field and after.pos < before.stop:
            raise OverlappingSegments(
                f"{name}: {after.field} [{before.pos}, {before.stop}) and "
                f"[{after.pos}, {after.stop}) overlap."
            )


def file_problem(file: str, run_id: RunId, policy_version: int | None) -> str | None:
    """Why ``file`` cannot be a payload file of this run (and version, where one is given)."""
    try:
        path = parse_path(file, run_id=run_id)
    except PayloadError as exc:
        return str(exc)
    if policy_version is not None and path.policy_version != policy_version:
        return f"{file} is of v{path.policy_version}, the lease of v{policy_version}"
    if path.request_id is None or fan_out(path.request_id) != path.fan_out:
        return f"{file} does not lie in the folder of its request"
    return None
