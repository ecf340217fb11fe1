"""A reader process of the orchestrator: decodes and reads one large rollout. Run by the kit."""

from typing import Final

import msgspec

from services.orchestrator.decoding import Undecodable, decode_delivered, decode_turns
from services.orchestrator.intake import read
from services.orchestrator.reader_wire import (
    Answer,
    NotOpened,
    Opened,
    OpenRollout,
    Question,
    Read,
    ReadRollout,
)
from services.orchestrator.storage.samples import encode_samples
from services.orchestrator.wire import DeliveredWire, RolloutWire

_QUESTIONS: Final = msgspec.msgpack.Decoder(Question)


class Reading:
    """One rollout: opened by the first question, read by the second."""

    def __init__(self) -> None:
        self._rollout: RolloutWire | None = None

    def ask(self, head: bytes, body: bytearray) -> tuple[bytes, bytes]:
        """The answer to one question."""
        answer, data = self._answer(_QUESTIONS.decode(head), body)
        return msgspec.msgpack.encode(answer), data

    def _answer(self, question: Question, body: bytearray) -> tuple[Answer, bytes]:
        if isinstance(question, ReadRollout):
            assert self._rollout is not None, "it was opened"
            delivery = read(self._rollout, question.lease, question.rules, question.digest)
            return Read.of(delivery), encode_samples(delivery.samples)
        try:
            if isinstance(question, OpenRollout):
                wire = decode_delivered(question.content_type, body)
                ways, self._rollout = wire.ways, wire.with_turns(wire.turns)
            else:
                wire = question.rollout
                ways, self._rollout = wire.ways, wire.with_turns(decode_turns(body))
        except Undecodable as exc:
            return NotOpened.of(exc.detail, exc.faults), b""
        return Opened(_without_turns(wire), ways), b""


def _without_turns(wire: DeliveredWire) -> DeliveredWire:
    return msgspec.structs.replace(wire, turns=[])
