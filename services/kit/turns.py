"""Turns between services: what the proxy keeps of a request is what the orchestrator takes in.

Msgpack of these structs, arrays as little-endian bytes.
"""

from typing import Annotated, Final

import msgspec

from sideband.ids import ID_PATTERN
from sideband.model import ModelShape
from sideband.segments import PayloadSegment

TURNS_CONTENT_TYPE: Final = "application/vnd.sideband.turns+msgpack"
TURNS_MAX: Final = 4096  # of one rollout; the longest public agent traces have hundreds
CHOICES_MAX: Final = 4096

# "$" alone would admit a trailing line feed.
Id = Annotated[str, msgspec.Meta(pattern=ID_PATTERN.removesuffix("$") + r"\Z", max_length=128)]


class TurnWire(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One delivered request: P prompt and C completion tokens.

    ``prompt_token_ids``, ``completion_token_ids`` and ``weight_versions`` are int32, ``logprobs``
    and ``advantages`` float32, ``sampled`` one byte per completion token (absent: all were).
    By handle ``payload_segments``; inline ``routed_experts`` (base64 npy, as the engine sent it)
    and ``sampling_mask`` (one list of kept ids per completion token), with
    ``sampling_mask_logprobs`` a number for each kept id. ``choice_count`` is the n of the request:
    its one file serves the rollouts of all its choices.
    """

    request_id: Id
    prompt_token_ids: bytes
    completion_token_ids: bytes
    logprobs: bytes
    sampled: bytes | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    choice_count: Annotated[int, msgspec.Meta(ge=1, le=CHOICES_MAX)] = 1
    payload_segments: list[PayloadSegment] | None = None
    payload_model: ModelShape | None = None
    routed_experts: str | None = None
    routed_layer_ids: list[int] | None = None
    routed_experts_prompt_start: Annotated[int, msgspec.Meta(ge=0)] = 0
    sampling_mask: list[list[int]] | None = None
    sampling_mask_logprobs: list[list[float | None]] | None = None
    weight_versions: bytes | None = None
    advantages: bytes | None = None
