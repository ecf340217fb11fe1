"""The binary form of a delivered rollout: msgpack of these structs, arrays as little-endian bytes.

``Content-Type: application/vnd.sideband.rollout+msgpack``. The JSON form (``schemas.py``) has the
same fields with lists in place of bytes, and becomes this before anything looks at it.
"""

from typing import Annotated, Final, Literal

import msgspec

from services.kit.turns import TURNS_MAX, Id, TurnWire

ROLLOUT_CONTENT_TYPE: Final = "application/vnd.sideband.rollout+msgpack"

Status = Literal["completed", "failed", "aborted", "cancelled"]


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
