"""The binary form of a delivered rollout: msgpack of these structs, arrays as little-endian bytes.

``Content-Type: application/vnd.sideband.rollout+msgpack``. The JSON form (``schemas.py``) has the
same fields with lists in place of bytes, and becomes this before anything looks at it.
"""

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from services.kit.turns import CHOICES_MAX, TURNS_MAX, Id, TurnWire

ROLLOUT_CONTENT_TYPE: Final = "application/vnd.sideband.rollout+msgpack"

Status = Literal["completed", "failed", "aborted", "cancelled"]


class RolloutWire(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A finished rollout: its turns in the order in which they were sent."""

    rollout_id: Id
    status: Status
    reward: float | None = None
    advantage: float | None = None
    turns: Annotated[list[TurnWire], msgspec.Meta(max_length=TURNS_MAX)] = []


class TurnRefWire(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One choice of a request whose turn the proxy has kept."""

    request_id: Id
    choice: Annotated[int, msgspec.Meta(ge=0, lt=CHOICES_MAX)] = 0


class DeliveredWire(RolloutWire, kw_only=True, forbid_unknown_fields=True):
    """What a client sends: the turns themselves, or where the proxy has them.

    By ``turn_refs`` in the order in which they were sent, or by ``session_id``: all its turns in
    the order in which they were answered, ``choice`` of each.
    """

    turn_refs: (
        Annotated[list[TurnRefWire], msgspec.Meta(min_length=1, max_length=TURNS_MAX)] | None
    ) = None
    session_id: Id | None = None
    choice: Annotated[int, msgspec.Meta(ge=0, lt=CHOICES_MAX)] = 0

    @property
    def ways(self) -> int:
        """How many ways of saying its turns it uses; one is the most."""
        return bool(self.turns) + (self.turn_refs is not None) + (self.session_id is not None)

    @property
    def is_by_reference(self) -> bool:
        """Whether the turns are the proxy's."""
        return self.turn_refs is not None or self.session_id is not None

    def with_turns(self, turns: Sequence[TurnWire]) -> RolloutWire:
        """The rollout with these turns."""
        return RolloutWire(
            rollout_id=self.rollout_id,
            status=self.status,
            reward=self.reward,
            advantage=self.advantage,
            turns=list(turns),
        )


class _Decoder:
    """One decoder per process: building it compiles the schema."""

    rollout: Final = msgspec.msgpack.Decoder(DeliveredWire)


def decode_rollout(body: bytes | bytearray) -> DeliveredWire:
    """The rollout in ``body``. Raises msgspec.MsgspecError, UnicodeDecodeError, RecursionError."""
    return _Decoder.rollout.decode(body)


def encode_rollout(rollout: RolloutWire) -> bytes:
    """The binary form. Equal rollouts give equal bytes, whichever form they came in: defaults are
    written out.
    """
    return msgspec.msgpack.encode(rollout)
