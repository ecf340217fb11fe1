"""What the orchestrator and its reader processes say to each other: MessagePack of these structs.

Both are the same program. Rows, tokens and samples travel beside them, as bytes.
"""

from typing import Self

import msgspec

from services.kit.problems import Fault
from services.orchestrator.collecting import Delivery
from services.orchestrator.intake import IntakeRules
from services.orchestrator.records import DropReason, Lease, Tally
from services.orchestrator.wire import DeliveredWire
from sideband.batch.types import Sample
from sideband.ids import RolloutId


class OpenRollout(msgspec.Struct, frozen=True, tag=True):
    """Decode the body: a rollout of this content type."""

    content_type: str


class OpenTurns(msgspec.Struct, frozen=True, tag=True):
    """Decode the body: the turns of ``rollout``, as the proxy gives them."""

    rollout: DeliveredWire


class ReadRollout(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Read what was decoded: ``intake.read``."""

    lease: Lease | None
    rules: IntakeRules
    digest: str | None


class Opened(msgspec.Struct, frozen=True, tag=True):
    """It was decoded: all but its turns, and in how many ways it says them."""

    rollout: DeliveredWire
    ways: int


class FaultWire(msgspec.Struct, frozen=True):
    """A ``Fault``."""

    field: str
    rule: str
    value: str | None


class NotOpened(msgspec.Struct, frozen=True, tag=True):
    """It cannot be decoded."""

    detail: str
    faults: list[FaultWire]

    @classmethod
    def of(cls, detail: str, faults: list[Fault]) -> Self:
        """In the words of ``Undecodable``."""
        return cls(detail, [FaultWire(each.field, each.rule, each.value) for each in faults])

    def to_faults(self) -> list[Fault]:
        """The faults again."""
        return [Fault(field=each.field, rule=each.rule, value=each.value) for each in self.faults]


class Read(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A ``Delivery``, its samples in the body."""

    rollout_id: str
    digest: str
    reward: float | None
    is_waiting: bool
    tally: Tally
    files: frozenset[str]
    files_trained: frozenset[str]
    files_shared: frozenset[str]
    drop: DropReason | None
    detail: str
    refusal: str | None

    @classmethod
    def of(cls, delivery: Delivery) -> Self:
        """All of it but the samples."""
        return cls(**{name: getattr(delivery, name) for name in cls.__struct_fields__})

    def delivery(self, samples: tuple[Sample, ...]) -> Delivery:
        """The delivery again."""
        members = {name: getattr(self, name) for name in self.__struct_fields__}
        return Delivery(**{**members, "rollout_id": RolloutId(self.rollout_id)}, samples=samples)


Question = OpenRollout | OpenTurns | ReadRollout
Answer = Opened | NotOpened | Read
