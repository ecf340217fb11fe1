"""A step as the feed holds it: the messages to its ranks, cut and encoded once.

The frames of one step cost what the step's own body costs; the decoded step is dropped micro batch
by micro batch. Tensor and pipeline siblings share one frame.
"""

import hashlib
from dataclasses import dataclass

from sideband.feed.codec import OpenStep, encode_chunks, open_step
from sideband.feed.facts import StepFacts
from sideband.feed.frames import encode_micro_batch
from sideband.feed.messages import MicroBatchMessage
from sideband.feed.ready import ReadyFrame, ready_frame
from sideband.fields import FIELDS


@dataclass(frozen=True, slots=True)
class OutgoingStep:
    """``frames[dp_rank][index][cp_rank]`` is one micro batch, as it is sent."""

    facts: StepFacts
    frames: tuple[tuple[tuple[ReadyFrame, ...], ...], ...]


def outgoing_step(body: bytes, *, lineage: int) -> OutgoingStep:
    """Check, cut and encode the whole step of the run's ``lineage``; slow: call it in a thread.

    Raises UnreadableStep or MalformedStep.
    """
    step = open_step(body)
    frames = tuple(
        tuple(_frames(step, dp_rank, index, lineage) for index in range(step.micro_batch_count))
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
    return OutgoingStep(facts, frames)


def _frames(step: OpenStep, dp_rank: int, index: int, lineage: int) -> tuple[ReadyFrame, ...]:
    """A frame for each CP rank. Its fields are those that the whole row carries."""
    batch = step.micro_batch(dp_rank, index)
    present = {segment.field for segment in batch.segments}
    message = MicroBatchMessage(
        run_id=step.run_id,
        lineage=lineage,
        step=step.step,
        index=index,
        count=step.micro_batch_count,
        fields=tuple(field for field in FIELDS if field in present),
        model=step.model,
    )
    bodies = encode_chunks(batch, step.model, cp_size=step.cp_size, layout=step.layout)
    return tuple(ready_frame(encode_micro_batch(message, body)) for body in bodies)
