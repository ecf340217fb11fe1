"""ZMQ messages between feed and rank: docs/feed-protocol.md section 3.

A message is a prefix frame, a header frame and, for MICRO_BATCH only, a body frame. Every bound is
part of the type, so that a header is refused as a whole or right as a whole.

Errors: MalformedFrame, UnsupportedProtocol.
"""

import functools
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from sideband.batch.types import Layout
from sideband.errors import InvalidInput
from sideband.feed.errors import MalformedFrame, UnsupportedProtocol
from sideband.feed.limits import (
    HEADER_BYTES_MAX,
    MICRO_BATCHES_MAX,
    RANKS_MAX,
    REASON_CHARS_MAX,
    STEP_BODY_BYTES_MAX,
    STEP_MAX,
    WAITING_FOR_MAX,
)
from sideband.model import ModelShape
from sideband.segments import Field

MAGIC: Final = b"SB"
PROTOCOL_VERSION: Final = 1
PREFIX_BYTES: Final = 4

# "$" would admit a trailing newline.
Id = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._:-]{1,128}\Z")]
Reason = Annotated[str, Meta(max_length=REASON_CHARS_MAX)]
StepNumber = Annotated[int, Meta(ge=0, le=STEP_MAX)]
Index = Annotated[int, Meta(ge=0, le=MICRO_BATCHES_MAX)]
Rank = Annotated[int, Meta(ge=0, lt=RANKS_MAX)]
Sequence64 = Annotated[int, Meta(ge=0, le=1 << 62)]


class Header(msgspec.Struct, frozen=True):
    """Root of all headers."""


class HelloMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank joins, or joins again."""

    protocol: Annotated[int, Meta(ge=0, le=255)] = PROTOCOL_VERSION
    instance: Id
    run_id: Id | None = None
    global_rank: Rank | None = None  # None: dp_rank × cp_size + cp_rank, where that is enough
    dp_rank: Rank
    cp_rank: Rank
    committed_step: StepNumber | None = None
    resume_step: StepNumber | None = None
    resume_index: Index | None = None
    credit: Annotated[int, Meta(ge=0, le=1 << 16)]
    model: ModelShape | None = None


class CreditMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every micro batch up to ``seq`` was taken off the queue."""

    seq: Sequence64


class ReadMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything before this place was assembled."""

    step: StepNumber
    index: Index


class CommitMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimizer step is done. Any connection may send it."""

    run_id: Id
    global_rank: Rank
    step: StepNumber


class FailMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rank cannot go on with ``step``."""

    run_id: Id
    global_rank: Rank
    step: StepNumber
    reason: Reason


class PingMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Alive."""

    run_id: Id | None = None
    global_rank: Rank


class ByeMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rank leaves."""


class WelcomeMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rank has joined."""

    run_id: Id
    global_rank: Rank
    dp_size: Rank
    cp_size: Rank
    layout: Layout
    rank_count: Annotated[int, Meta(ge=1, le=RANKS_MAX)]
    generation: Annotated[int, Meta(ge=1)]
    committed_step: StepNumber | None = None


class RefusedMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rank has not joined; with ``retry_after_s`` it may ask again."""

    code: Id
    reason: Reason
    retry_after_s: float | None = None


class MicroBatchMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One micro batch; its chunk is the body frame."""

    run_id: Id
    step: StepNumber
    index: Index
    count: Annotated[int, Meta(ge=1, le=MICRO_BATCHES_MAX)]
    seq: Sequence64
    fields: tuple[Field, ...]
    model: ModelShape | None = None


class ReleaseMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every rank has read everything before this place."""

    step: StepNumber
    index: Index


class CommittedMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The commit is recorded."""

    step: StepNumber


class AbortMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The step failed."""

    step: StepNumber
    reason: Reason


class PongMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to PING: what the feed has and waits for."""

    committed_step: StepNumber | None = None
    waiting_for: Annotated[tuple[Rank, ...], Meta(max_length=WAITING_FOR_MAX)] = ()


class EndMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing follows ``last_step``."""

    last_step: StepNumber


class ResyncMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The feed does not know this connection."""


FROM_RANK: Final[dict[int, type[Header]]] = {
    1: HelloMessage,
    2: CreditMessage,
    3: ReadMessage,
    4: CommitMessage,
    5: FailMessage,
    6: PingMessage,
    7: ByeMessage,
}
FROM_FEED: Final[dict[int, type[Header]]] = {
    33: WelcomeMessage,
    34: RefusedMessage,
    35: MicroBatchMessage,
    36: ReleaseMessage,
    37: CommittedMessage,
    38: AbortMessage,
    39: PongMessage,
    40: EndMessage,
    41: ResyncMessage,
}
_PREFIXES: Final = {
    kind: MAGIC + bytes((PROTOCOL_VERSION, number))
    for number, kind in (FROM_RANK | FROM_FEED).items()
}
_DECODERS: Final = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (FROM_RANK | FROM_FEED).values()
}
_ENCODER: Final = msgspec.msgpack.Encoder()

Frame = bytes | memoryview


def encode_message(header: Header, body: Frame | None = None) -> list[Frame]:
    """The frames of one message; ``body`` exactly for a MicroBatchMessage."""
    assert (body is not None) == isinstance(header, MicroBatchMessage), "only chunks have a body"
    frames: list[Frame] = [_PREFIXES[type(header)], _ENCODER.encode(header)]
    return frames if body is None else [*frames, body]


def decode_message(
    frames: Sequence[Frame], kinds: dict[int, type[Header]]
) -> tuple[Header, Frame | None]:
    """The header of one of ``kinds`` (FROM_RANK or FROM_FEED), and its body.

    Raises UnsupportedProtocol before anything behind the prefix is read, else MalformedFrame.
    """
    if not frames:
        raise MalformedFrame("prefix", "is missing")
    prefix = bytes(frames[0][: PREFIX_BYTES + 1])
    if len(prefix) != PREFIX_BYTES or prefix[:2] != MAGIC:
        raise MalformedFrame("prefix", "must be S, B, version, type")
    if prefix[2] != PROTOCOL_VERSION:
        raise UnsupportedProtocol(prefix[2], readable=PROTOCOL_VERSION)
    kind = kinds.get(prefix[3])
    if kind is None:
        raise MalformedFrame("prefix", f"type {prefix[3]} does not exist in this direction")
    has_body = kind is MicroBatchMessage
    if len(frames) != 2 + has_body:
        raise MalformedFrame("message", f"has {len(frames)} frames, must have {2 + has_body}")
    if len(frames[1]) > HEADER_BYTES_MAX:
        raise MalformedFrame("header", f"holds more than {HEADER_BYTES_MAX} bytes")
    body = frames[2] if has_body else None
    if body is not None and len(body) > STEP_BODY_BYTES_MAX:
        raise MalformedFrame("body", f"holds more than {STEP_BODY_BYTES_MAX} bytes")
    return _decode_header(frames[1], kind), body


def _decode_header(frame: Frame, kind: type[Header]) -> Header:
    try:
        header = _DECODERS[kind].decode(frame)
        if isinstance(header, HelloMessage | MicroBatchMessage) and header.model is not None:
            _checked(header.model)
    except (msgspec.MsgspecError, RecursionError, InvalidInput) as exc:
        raise MalformedFrame("header", str(exc)) from exc
    if isinstance(header, HelloMessage) and (header.resume_step is None) != (
        header.resume_index is None
    ):
        raise MalformedFrame("header", "resume_step and resume_index come together")
    return header


@functools.lru_cache(maxsize=16)
def _checked(model: ModelShape) -> ModelShape:
    """The model after its check. Raises InvalidInput; the model of a run comes with every row."""
    return model.check()


def shortened(reason: str) -> str:
    """A reason that fits its field."""
    return reason if len(reason) <= REASON_CHARS_MAX else reason[: REASON_CHARS_MAX - 1] + "…"
