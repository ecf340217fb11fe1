"""Messages as frames: docs/feed-protocol.md section 3.

A message is a prefix frame and a header frame; PROGRESS is both in one. A MICRO_BATCH is one frame
too, with its chunk, made once when the step comes; a release may ride on it in a second.

Errors: MalformedFrame, UnsupportedProtocol.
"""

import functools
import struct
from collections.abc import Sequence
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from sideband.errors import InvalidInput
from sideband.feed.errors import MalformedFrame, UnsupportedProtocol
from sideband.feed.facts import Place
from sideband.feed.limits import HEADER_BYTES_MAX, MICRO_BATCHES_MAX, STEP_BODY_BYTES_MAX
from sideband.feed.messages import (
    FROM_FEED,
    FROM_RANK,
    PROTOCOL_VERSION,
    Header,
    HelloMessage,
    Id,
    Index,
    LineageNumber,
    MicroBatchMessage,
    ProgressMessage,
    ReleaseMessage,
    StepNumber,
)
from sideband.model import ModelShape
from sideband.segments import Field

Frame = bytes | memoryview
MAGIC: Final = b"SB"
PREFIX_BYTES: Final = 4
AnyFrame = TypeVar("AnyFrame")
_SIZE: Final = struct.Struct("<I")


class _MicroBatchWire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model is the same in each message of a run, and read once."""

    run_id: Id
    lineage: LineageNumber
    step: StepNumber
    index: Index
    count: Annotated[int, Meta(ge=1, le=MICRO_BATCHES_MAX)]
    fields: tuple[Field, ...]
    model: msgspec.Raw = msgspec.Raw(b"\xc0")  # nil


_PREFIXES: Final = {
    kind: MAGIC + bytes((PROTOCOL_VERSION, number))
    for number, kind in (FROM_RANK | FROM_FEED).items()
}
_DECODERS: Final = {
    kind: msgspec.msgpack.Decoder(kind)
    for kind in (FROM_RANK | FROM_FEED).values()
    if kind is not MicroBatchMessage
}
_MICRO_BATCH_DECODER: Final = msgspec.msgpack.Decoder(_MicroBatchWire)
_MODEL_DECODER: Final = msgspec.msgpack.Decoder(ModelShape | None)
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode_message(header: Header) -> list[Frame]:
    """The frames of one message; ``encode_micro_batch`` has those of a micro batch."""
    prefix, content = _PREFIXES[type(header)], _ENCODER.encode(header)
    return [prefix + content] if type(header) is ProgressMessage else [prefix, content]


def encode_micro_batch(message: MicroBatchMessage, body: Frame) -> bytes:
    """The frame of one micro batch, without what is ``released``."""
    wire = _MicroBatchWire(
        run_id=message.run_id,
        lineage=message.lineage,
        step=message.step,
        index=message.index,
        count=message.count,
        fields=message.fields,
        model=msgspec.Raw(_ENCODER.encode(message.model)),
    )
    header = _ENCODER.encode(wire)
    return b"".join((_PREFIXES[MicroBatchMessage], _SIZE.pack(len(header)), header, body))


def with_release(frame: AnyFrame, released: Place | None) -> Sequence[AnyFrame | bytes]:
    """The frames of a micro batch that tells a release too, where there is one."""
    if released is None:
        return [frame]
    return [frame, _ENCODER.encode(ReleaseMessage(step=released[0], index=released[1]))]


def decode_message(
    frames: Sequence[Frame], kinds: dict[int, type[Header]]
) -> tuple[Header, Frame | None]:
    """The header of one of ``kinds`` (FROM_RANK or FROM_FEED), and a micro batch's chunk.

    Raises UnsupportedProtocol before anything behind the prefix is read, else MalformedFrame.
    """
    if not frames:
        raise MalformedFrame("prefix", "is missing")
    first = frames[0]
    prefix = bytes(first[:PREFIX_BYTES])
    if len(prefix) != PREFIX_BYTES or prefix[:2] != MAGIC:
        raise MalformedFrame("prefix", "must be S, B, version, type")
    if prefix[2] != PROTOCOL_VERSION:
        raise UnsupportedProtocol(prefix[2], readable=PROTOCOL_VERSION)
    kind = kinds.get(prefix[3])
    if kind is None:
        raise MalformedFrame("prefix", f"type {prefix[3]} does not exist in this direction")
    if kind is MicroBatchMessage:
        return _micro_batch(frames)
    expected = 1 if kind is ProgressMessage else 2
    if len(frames) != expected:
        found = f"{len(frames)} frames or more" if len(frames) > expected else len(frames)
        raise MalformedFrame("message", f"has {found}, must have {expected} frames")
    if expected == 2 and len(first) != PREFIX_BYTES:
        raise MalformedFrame("prefix", f"must be a frame of {PREFIX_BYTES} bytes")
    return _header(frames[1] if expected == 2 else first[PREFIX_BYTES:], kind), None


def _micro_batch(frames: Sequence[Frame]) -> tuple[MicroBatchMessage, Frame]:
    """The first frame's size was checked by the socket."""
    if len(frames) > 2:
        raise MalformedFrame("message", f"has {len(frames)} frames, at most 2")
    first, begin = frames[0], PREFIX_BYTES + _SIZE.size
    if len(first) < begin:
        raise MalformedFrame("header", "has no size")
    [header_bytes] = _SIZE.unpack_from(first, PREFIX_BYTES)
    end = begin + header_bytes
    if header_bytes > HEADER_BYTES_MAX or end > len(first):
        raise MalformedFrame("header", f"of {header_bytes} bytes is too long")
    if len(first) - end > STEP_BODY_BYTES_MAX:
        raise MalformedFrame("body", f"holds more than {STEP_BODY_BYTES_MAX} bytes")
    try:
        wire = _MICRO_BATCH_DECODER.decode(first[begin:end])
        model = _model(bytes(wire.model))
    except (msgspec.MsgspecError, RecursionError, InvalidInput) as exc:
        raise MalformedFrame("header", str(exc)) from exc
    message = MicroBatchMessage(
        run_id=wire.run_id,
        lineage=wire.lineage,
        step=wire.step,
        index=wire.index,
        count=wire.count,
        fields=wire.fields,
        released=_released(frames[1]) if len(frames) == 2 else None,
        model=model,
    )
    return message, first[end:]


def _released(frame: Frame) -> Place:
    release = _header(frame, ReleaseMessage)
    assert isinstance(release, ReleaseMessage), "its decoder gives nothing else"
    return release.step, release.index


def _header(frame: Frame, kind: type[Header]) -> Header:
    if len(frame) > HEADER_BYTES_MAX:
        raise MalformedFrame("header", f"holds more than {HEADER_BYTES_MAX} bytes")
    try:
        header = _DECODERS[kind].decode(frame)
        if isinstance(header, HelloMessage) and header.model is not None:
            header.model.check()
    except (msgspec.MsgspecError, RecursionError, InvalidInput) as exc:
        raise MalformedFrame("header", str(exc)) from exc
    if isinstance(header, HelloMessage):
        _check_hello(header)
    return header


def _check_hello(hello: HelloMessage) -> None:
    if (hello.resume_step is None) != (hello.resume_index is None):
        raise MalformedFrame("header", "resume_step and resume_index come together")
    if hello.committed_lineage is not None and hello.committed_step is None:
        raise MalformedFrame("header", "committed_lineage comes with committed_step")


@functools.lru_cache(maxsize=16)
def _model(data: bytes) -> ModelShape | None:
    """The checked model in ``data``. Raises what decoding raises, or InvalidInput."""
    model = _MODEL_DECODER.decode(data)
    return None if model is None else model.check()
