"""Large rollouts are decoded and read by a process of their own; here is who asks it.

What comes back is what decoding and reading on the spot give: the same delivery, bit by bit, or the
same refusal.
"""

import asyncio
from collections import deque
from typing import Final

import msgspec

from services.kit.readers.pool import ReaderJob, ReaderLimits, ReaderPool
from services.orchestrator.collecting import Delivery
from services.orchestrator.decoding import Undecodable
from services.orchestrator.intake import IntakeRules
from services.orchestrator.reader_wire import (
    Answer,
    NotOpened,
    Opened,
    OpenRollout,
    OpenTurns,
    Question,
    Read,
    ReadRollout,
)
from services.orchestrator.records import Lease
from services.orchestrator.storage.samples import decode_samples
from services.orchestrator.wire import DeliveredWire

READER: Final = "services.orchestrator.reader"
HELD_BYTES_MAX: Final = 1 << 30  # of large bodies that wait or are read; a larger limit holds one
_ANSWERS: Final = msgspec.msgpack.Decoder(Answer)


def reader_pool(body_bytes_max: int) -> ReaderPool:
    """The readers of an orchestrator that takes bodies of so many bytes."""
    return ReaderPool(READER, ReaderLimits(bytes_max=max(HELD_BYTES_MAX, body_bytes_max)))


class LargeRollout:
    """A rollout in a reader's memory."""

    def __init__(self, job: ReaderJob, opened: Opened) -> None:
        self._job = job
        self.wire, self.ways = opened.rollout, opened.ways

    @classmethod
    async def opened(cls, job: ReaderJob, content_type: str, body: deque[bytes]) -> "LargeRollout":
        """Decode a rollout. Raises Undecodable, ReaderLost."""
        return await cls._open(job, OpenRollout(content_type), body)

    @classmethod
    async def of_turns(
        cls, job: ReaderJob, wire: DeliveredWire, turns: deque[bytes]
    ) -> "LargeRollout":
        """Decode the turns of a rollout. Raises Undecodable, ReaderLost."""
        return await cls._open(job, OpenTurns(wire), turns)

    @classmethod
    async def _open(cls, job: ReaderJob, question: Question, body: deque[bytes]) -> "LargeRollout":
        answer, _ = await _asked(job, question, body)
        if isinstance(answer, NotOpened):
            raise Undecodable(answer.detail, answer.to_faults())
        assert isinstance(answer, Opened), "a reader answers what it was asked"
        return cls(job, answer)

    async def read(self, lease: Lease | None, rules: IntakeRules, digest: str | None) -> Delivery:
        """What ``intake.read`` gives. Once: others have the reader from then on.

        Raises ReaderLost.
        """
        question = ReadRollout(lease=lease, rules=rules, digest=digest)
        answer, samples = await _asked(self._job, question, deque())
        self._job.done()
        assert isinstance(answer, Read), "a reader answers what it was asked"
        return answer.delivery(await asyncio.to_thread(decode_samples, samples))


async def _asked(
    job: ReaderJob, question: Question, body: deque[bytes]
) -> tuple[Answer, memoryview]:
    head, data = await job.ask(msgspec.msgpack.encode(question), body)
    return _ANSWERS.decode(head), data
