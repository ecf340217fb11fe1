"""What the feed cuts once for all ranks equals what is cut for each rank on its own."""

import pytest
from hypothesis import given

from sideband.batch.chunks import cut_chunk
from sideband.batch.packing import PackingPlan, pack
from sideband.batch.types import Sample
from sideband.feed.codec import Step, encode_chunk, encode_step
from sideband.feed.errors import MalformedStep
from sideband.feed.frames import decode_message
from sideband.feed.messages import FROM_FEED, MicroBatchMessage
from sideband.feed.outgoing import outgoing_step
from sideband.feed.router import Router
from sideband.ids import RunId
from sideband.testing.batch_strategies import plans, sample_lists
from sideband.testing.batches import WIDE_MODEL, make_sample
from tests.unit.feed.builders import make_step


@given(samples=sample_lists(min_size=1, models=(WIDE_MODEL,)), plan=plans(cp_size_max=4))
def test_every_message_is_the_chunk_of_its_rank(samples: list[Sample], plan: PackingPlan) -> None:
    step = Step(
        run_id=RunId("run-a"),
        step=7,
        model=WIDE_MODEL,
        dp_size=plan.dp_size,
        cp_size=plan.cp_size,
        layout=plan.layout,
        grid=tuple(tuple(row) for row in pack(samples, plan)),
    )
    outgoing = outgoing_step(encode_step(step), lineage=3)
    assert (outgoing.facts.step, outgoing.facts.count) == (7, step.micro_batch_count)
    for dp_rank, row in enumerate(step.grid):
        for index, batch in enumerate(row):
            present = {segment.field for segment in batch.segments}
            for cp_rank in range(plan.cp_size):
                chunk = cut_chunk(batch, cp_rank=cp_rank, cp_size=plan.cp_size, layout=plan.layout)
                frame = outgoing.frames[dp_rank][index][cp_rank]
                header, body = decode_message([frame.buffer], FROM_FEED)
                assert body == encode_chunk(chunk, WIDE_MODEL)
                assert isinstance(header, MicroBatchMessage)
                assert (header.run_id, header.step, header.index) == (step.run_id, 7, index)
                assert header.lineage == 3
                assert (header.count, header.model) == (step.micro_batch_count, WIDE_MODEL)
                assert set(header.fields) == present


def test_a_held_step_costs_what_its_body_costs() -> None:
    samples = [
        make_sample(i, tokens=3000, prompt_tokens=900, breaks=(1000,), form="handle")
        for i in range(8)
    ]
    body = encode_step(make_step(samples=samples, seq_len=8192, dp_size=2, cp_size=4))
    outgoing = outgoing_step(body, lineage=0)
    held = sum(len(frame) for row in outgoing.frames for batch in row for frame in batch)
    assert held < 1.1 * len(body)


def test_a_step_with_one_bad_row_is_refused_by_its_name() -> None:
    step = make_step(dp_size=2, form=None, model=None)
    step.grid[1][0].token_ids_L[0] = -1
    with pytest.raises(MalformedStep, match=r"grid\[1\]\[0\]\.token_ids"):
        outgoing_step(encode_step(step), lineage=3)


def test_nobody_there_is_said_and_the_socket_goes_on() -> None:
    router = Router("tcp://127.0.0.1:*")
    try:
        assert router.receive() is None
        assert not router.send(b"nobody", [b"prefix", b"header"])
        assert not router.send(b"nobody", [b"prefix", b"header", bytes(1 << 17)])
        assert router.receive() is None
    finally:
        router.close()
