"""What Sideband does with a step between the samples and the ranks, as plain calls.

The orchestrator packs and encodes; the feed decodes, cuts each micro batch for its CP ranks and
encodes the chunks. HTTP and ZMQ between them have rows of their own.
"""

from collections.abc import Iterator, Sequence

from sideband.batch.chunks import cut_chunk
from sideband.batch.packing import PackingPlan, plan_rows
from sideband.batch.types import Sample
from sideband.feed.codec import Step, decode_step, encode_chunk, encode_step
from sideband.ids import RunId
from sideband.model import ModelShape

RUN_ID = RunId("bench")


def step_of(samples: Sequence[Sample], plan: PackingPlan, model: ModelShape) -> Step:
    """The packed step; its rows are filled one by one when they are encoded, as a service does."""
    return Step(
        run_id=RUN_ID,
        step=1,
        model=model,
        dp_size=plan.dp_size,
        cp_size=plan.cp_size,
        layout=plan.layout,
        grid=plan_rows(samples, plan),
    )


def orchestrator_side(samples: Sequence[Sample], plan: PackingPlan, model: ModelShape) -> bytes:
    """Samples to the body that goes to the feed."""
    return encode_step(step_of(samples, plan, model))


def feed_side(body: bytes) -> Iterator[bytes]:
    """The body to the messages to the ranks, one by one: data rank, micro batch, CP rank."""
    step = decode_step(body)
    for row in step.grid:
        for micro_batch in row:
            for cp_rank in range(step.cp_size):
                chunk = cut_chunk(
                    micro_batch, cp_rank=cp_rank, cp_size=step.cp_size, layout=step.layout
                )
                yield encode_chunk(chunk, step.model)


def egress_bytes(body: bytes) -> int:
    """Bytes of all messages to all ranks."""
    return sum(len(message) for message in feed_side(body))
