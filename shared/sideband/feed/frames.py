"""Messages as frames: docs/feed-protocol.md section 3.

A message is a prefix frame and a header frame; for PROGRESS and MICRO_BATCH, which are sent for
every micro batch, prefix and header are one frame, and MICRO_BATCH has a body frame.

Errors: MalformedFrame, UnsupportedProtocol.
"""

import functools
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from sideband.errors import InvalidInput
from sideband.feed.errors import MalformedFrame, UnsupportedProtocol
from sideband.feed.limits import HEADER_BYTES_MAX, MICRO_BATCHES_MAX, STEP_BODY_BYTES_MAX
from sideband.feed.messages import (
    FROM_FEED,
    FROM_RANK,
    PROTOCOL_VERSION,
    Header,
    HelloMessage,
    Id,
    Index,
    MicroBatchMessage,
    ProgressMessage,
    Sequence64,
    StepNumber,
)
from sideband.model import ModelShape
from sideband.segments import Field

Frame = bytes | memoryview
MAGIC: Final = b"SB"
PREFIX_BYTES: Final = 4


class _MicroBatchWire(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As MicroBatchMessage; the model is the same in each message of a run, and read once."""

    run_id: Id
    step: StepNumber
    index: Index
    count: Annotated[int, Meta(ge=1, le=MICRO_BATCHES_MAX)]
    seq: Sequence64
    fields: tuple[Field, ...]
    released: tuple[StepNumber, Index] | None = None
    model: msgspec.Raw = msgspec.Raw(b"\xc0")  # nil


_ONE_FRAME: Final = frozenset({ProgressMessage, MicroBatchMessage})
_PREFIXES: Final = {
    kind: MAGIC + bytes((PROTOCOL_VERSION, number))
    for number, kind in (FROM_RANK | FROM_FEED).items()
}
_DECODERS: Final = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (FROM_RANK | FROM_FEED).values()
}
_MICRO_BATCH_DECODER: Final = msgspec.msgpack.Decoder(_MicroBatchWire)
_MODEL_DECODER: Final = msgspec.msgpack.Decoder(ModelShape | None)
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode_message(header: Header, body: Frame | None = None) -> list[Frame]:
    """The frames of one message; ``body`` exactly for a MicroBatchMessage."""
    kind = type(header)
    assert (body is not None) == (kind is MicroBatchMessage), "only chunks have a body"
    prefix, content = _PREFIXES[kind], _ENCODER.encode(header)
    if kind not in _ONE_FRAME:
        return [prefix, content]
    return [prefix + content] if body is None else [prefix + content, body]


def decode_message(
    frames: Sequence[Frame], kinds: dict[int, type[Header]]
) -> tuple[Header, Frame | None]:
    """The header of one of ``kinds`` (FROM_RANK or FROM_FEED), and its body.

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
    expected = 1 if kind is ProgressMessage else 2
    if len(frames) != expected:
        raise MalformedFrame("message", f"has {len(frames)} frames, must have {expected}")
    if kind in _ONE_FRAME:
        content = first[PREFIX_BYTES:]
    elif len(first) == PREFIX_BYTES:
        content = frames[1]
    else:
        raise MalformedFrame("prefix", f"must be a frame of {PREFIX_BYTES} bytes")
    if len(content) > HEADER_BYTES_MAX:
        raise MalformedFrame("header", f"holds more than {HEADER_BYTES_MAX} bytes")
    body = frames[1] if kind is MicroBatchMessage else None
    if body is not None and len(body) > STEP_BODY_BYTES_MAX:
        raise MalformedFrame("body", f"holds more than {STEP_BODY_BYTES_MAX} bytes")
    return _decode_header(content, kind), body


def _decode_header(frame: Frame, kind: type[Header]) -> Header:
    try:
        if kind is MicroBatchMessage:
            return _micro_batch(_MICRO_BATCH_DECODER.decode(frame))
        header = _DECODERS[kind].decode(frame)
        if isinstance(header, HelloMessage) and header.model is not None:
            header.model.check()
    except (msgspec.MsgspecError, RecursionError, InvalidInput) as exc:
        raise MalformedFrame("header", str(exc)) from exc
    if isinstance(header, HelloMessage) and (header.resume_step is None) != (
        header.resume_index is None
    ):
        raise MalformedFrame("header", "resume_step and resume_index come together")
    return header


def _micro_batch(wire: _MicroBatchWire) -> MicroBatchMessage:
    return MicroBatchMessage(
        run_id=wire.run_id,
        step=wire.step,
        index=wire.index,
        count=wire.count,
        seq=wire.seq,
        fields=wire.fields,
        released=wire.released,
        model=_model(bytes(wire.model)),
    )


@functools.lru_cache(maxsize=16)
def _model(data: bytes) -> ModelShape | None:
    """The checked model in ``data``. Raises what decoding raises, or InvalidInput."""
    model = _MODEL_DECODER.decode(data)
    return None if model is None else model.check()
