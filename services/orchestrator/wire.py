"""The binary form of a delivered rollout: msgpack of these structs, arrays as little-endian bytes.

``Content-Type: application/vnd.sideband.rollout+msgpack``. The JSON form (``schemas.py``) has the
same fields with lists in place of bytes, and becomes this before anything looks at it.
"""

from typing import Annotated, Final, Literal

import msgspec

from services.orchestrator.limits import CHOICES_MAX, TURNS_MAX
from sideband.ids import ID_PATTERN
from sideband.model import ModelShape
from sideband.segments import PayloadSegment

ROLLOUT_CONTENT_TYPE: Final = "application/vnd.sideband.rollout+msgpack"

# "$" alone would admit a trailing line feed.
Id = Annotated[str, msgspec.Meta(pattern=ID_PATTERN.removesuffix("$") + r"\Z", max_length=128)]
Status = Literal["completed", "failed", "aborted", "cancelled"]


class TurnWire(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One delivered request: P prompt and C completion tokens.

    ``prompt_token_ids``, ``completion_token_ids`` and ``weight_versions`` are int32, ``logprobs``
    and ``advantages`` float32, ``sampled`` one byte per completion token (absent: all were).
    By handle ``payload_segments``; inline ``routed_experts`` (base64 npy, as the engine sent it)
    and ``sampling_mask`` (one list of kept ids per completion token). ``choice_count`` is the n of
    the request: its one file serves the rollouts of all its choices.
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
    weight_versions: bytes | None = None
    advantages: bytes | None = None


class RolloutWire(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A finished rollout: its turns in the order in which they were sent."""

    rollout_id: Id
    status: Status
    reward: float | None = None
    advantage: float | None = None
    turns: Annotated[list[TurnWire], msgspec.Meta(max_length=TURNS_MAX)] = []


class _Decoder:
    """One decoder per process: building it compiles the schema."""

    rollout: Final = msgspec.msgpack.Decoder(RolloutWire)


def decode_rollout(body: bytes) -> RolloutWire:
    """The rollout in ``body``. Raises msgspec.MsgspecError, UnicodeDecodeError, RecursionError."""
    return _Decoder.rollout.decode(body)


def encode_rollout(rollout: RolloutWire) -> bytes:
    """The binary form. Equal rollouts give equal bytes, whichever form they came in: defaults are
    written out.
    """
    return msgspec.msgpack.encode(rollout)
