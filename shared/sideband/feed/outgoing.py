"""A step as the feed holds it: the messages to its ranks, cut and encoded once.

The bodies of one step cost what the step's own body costs; the decoded step is dropped micro batch
by micro batch. Tensor and pipeline siblings share one body.
"""

import hashlib
from dataclasses import dataclass

from sideband.batch.types import MicroBatch
from sideband.feed.codec import OpenStep, encode_chunks, open_step
from sideband.feed.facts import Send, StepFacts
from sideband.feed.messages import MicroBatchMessage
from sideband.fields import FIELDS, Field


@dataclass(frozen=True, slots=True)
class OutgoingMicroBatch:
    """One micro batch: a body for each CP rank, and the fields that its whole row carries."""

    bodies: tuple[bytes, ...]
    fields: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class OutgoingStep:
    """``grid[dp_rank][index]`` is one micro batch."""

    facts: StepFacts
    grid: tuple[tuple[OutgoingMicroBatch, ...], ...]

    def message(self, send: Send, *, dp_rank: int, cp_rank: int) -> tuple[MicroBatchMessage, bytes]:
        """Header and body of one message to one rank."""
        batch = self.grid[dp_rank][send.index]
        header = MicroBatchMessage(
            run_id=self.facts.run_id,
            step=send.step,
            index=send.index,
            count=send.count,
            seq=send.seq,
            fields=batch.fields,
            released=send.released,
            model=self.facts.model,
        )
        return header, batch.bodies[cp_rank]


def outgoing_step(body: bytes) -> OutgoingStep:
    """Check, cut and encode the whole step; slow, so call it in a thread.

    Raises UnreadableStep or MalformedStep.
    """
    step = open_step(body)
    grid = tuple(
        tuple(
            _outgoing(step.micro_batch(dp_rank, index), step)
            for index in range(step.micro_batch_count)
        )
        for dp_rank in range(step.dp_size)
    )
    facts = StepFacts(
        run_id=step.run_id,
        step=step.step,
        count=step.micro_batch_count,
        digest=hashlib.sha256(body).hexdigest(),
        dp_size=step.dp_size,
        cp_size=step.cp_size,
        layout=step.layout,
        model=step.model,
    )
    return OutgoingStep(facts, grid)


def _outgoing(batch: MicroBatch, step: OpenStep) -> OutgoingMicroBatch:
    present = {segment.field for segment in batch.segments}
    return OutgoingMicroBatch(
        bodies=encode_chunks(batch, step.model, cp_size=step.cp_size, layout=step.layout),
        fields=tuple(field for field in FIELDS if field in present),
    )
