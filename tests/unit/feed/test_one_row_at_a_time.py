"""A step is planned first; its rows are filled, encoded and dropped one by one: same bytes."""

import tracemalloc
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given

from sideband.batch.packing import PackingPlan, pack, plan_rows
from sideband.batch.types import Sample
from sideband.feed.codec import STEP_MAGIC, STEP_VERSION, Step, encode_step
from sideband.feed.rows import encode_rows
from sideband.ids import RunId
from sideband.testing.batch_strategies import plans, sample_lists
from sideband.testing.batches import WIDE_MODEL, make_sample
from tests.unit.feed.builders import assert_same_rows, make_step


def planned(samples: list[Sample], plan: PackingPlan) -> Step:
    return Step(
        run_id=RunId("run-a"),
        step=7,
        model=WIDE_MODEL,
        dp_size=plan.dp_size,
        cp_size=plan.cp_size,
        layout=plan.layout,
        grid=plan_rows(samples, plan),
    )


def encoded_whole(step: Step) -> bytes:
    """The body as one call of the encoder writes it."""
    head = [STEP_MAGIC, STEP_VERSION, step.run_id, step.step, step.model, step.dp_size]
    rows = [[encode_rows(batch, step.model) for batch in row] for row in step.grid]
    return msgspec.msgpack.encode([*head, step.cp_size, step.layout, rows])


@given(samples=sample_lists(max_size=8, models=(WIDE_MODEL,)), plan=plans(cp_size_max=4))
def test_planned_rows_are_the_packed_rows_and_give_the_same_bytes(
    samples: list[Sample], plan: PackingPlan
) -> None:
    step = planned(samples, plan)
    packed = pack(samples, plan)
    for own, row in zip(step.grid, packed, strict=True):
        for got, expected in zip(own, row, strict=True):
            assert_same_rows(got, expected)
        assert len(own[1:]) == len(own) - 1
    body = encode_step(step)
    assert body == encode_step(replace(step, grid=packed)) == encoded_whole(step)


@pytest.mark.parametrize("count", [15, 16, 4096])
def test_long_lists_have_the_headers_that_the_encoder_writes(count: int) -> None:
    step = make_step(form=None, model=None, dp_size=1)
    many = replace(step, grid=[[step.grid[0][0]] * count])
    assert encode_step(many) == encoded_whole(many)


def test_encoding_holds_the_body_and_little_more() -> None:
    plan = PackingPlan(seq_len=4096, dp_size=2)
    samples = [make_sample(i, tokens=3000, prompt_tokens=900, form="handle") for i in range(64)]
    step = planned(samples, plan)
    tracemalloc.start()
    try:
        body = encode_step(step)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1.4 * len(body)
