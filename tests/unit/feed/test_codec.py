"""Steps and chunks survive the wire bit for bit, and cost what the protocol promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.batch.chunks import cut_chunk
from sideband.batch.packing import PackingPlan, pack
from sideband.batch.types import Layout, Sample
from sideband.feed.codec import Step, decode_chunk, decode_step, encode_chunk, encode_step
from sideband.feed.errors import MalformedStep, UnreadableStep
from sideband.ids import RunId
from sideband.segments import Form
from sideband.testing.batch_strategies import plans, sample_lists
from sideband.testing.batches import WIDE_MODEL, make_sample
from tests.unit.feed.builders import assert_same_rows, make_step


@given(
    samples=sample_lists(min_size=1, models=(WIDE_MODEL,)),
    plan=plans(cp_size_max=4),
)
def test_a_step_and_its_chunks_come_back_bit_for_bit(
    samples: list[Sample], plan: PackingPlan
) -> None:
    step = Step(
        run_id=RunId("run-a"),
        step=7,
        model=WIDE_MODEL,
        dp_size=plan.dp_size,
        cp_size=plan.cp_size,
        layout=plan.layout,
        grid=tuple(tuple(row) for row in pack(samples, plan)),
    )
    decoded = decode_step(encode_step(step))
    assert (decoded.run_id, decoded.step, decoded.model) == ("run-a", 7, WIDE_MODEL)
    assert decoded.micro_batch_count == step.micro_batch_count
    for got_row, row in zip(decoded.grid, step.grid, strict=True):
        for got, batch in zip(got_row, row, strict=True):
            assert_same_rows(got, batch)
            for cp_rank in range(plan.cp_size):
                chunk = cut_chunk(batch, cp_rank=cp_rank, cp_size=plan.cp_size, layout=plan.layout)
                again = cut_chunk(got, cp_rank=cp_rank, cp_size=plan.cp_size, layout=plan.layout)
                body = encode_chunk(again, WIDE_MODEL)
                assert body == encode_chunk(chunk, WIDE_MODEL)
                assert_same_rows(decode_chunk(body, WIDE_MODEL), chunk)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_step_or_a_named_error(body: bytes) -> None:
    with pytest.raises((MalformedStep, UnreadableStep)):
        decode_step(body)


FORMS: tuple[Form | None, ...] = ("handle", "inline", None)


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_a_mutated_step_is_refused_by_name_or_still_a_legal_step(
    form: Form | None, data: st.DataObject
) -> None:
    body = bytearray(encode_step(make_step(form=form)))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    try:
        step = decode_step(body if data.draw(st.booleans()) else body[:cut])
    except (MalformedStep, UnreadableStep):
        return
    assert decode_step(encode_step(step)).step == step.step


LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_by_handle_costs_at_most_ten_bytes_per_token(layout: Layout) -> None:
    samples = [
        make_sample(
            serial,
            tokens=3000 + serial,
            prompt_tokens=900,
            breaks=(1000, 2000, 2500),
            form="handle",
        )
        for serial in range(8)
    ]
    step = make_step(samples=samples, seq_len=8192, dp_size=2, cp_size=4, layout=layout)
    tokens = sum(len(sample) for sample in samples)
    body_bytes = len(encode_step(step))
    chunk_bytes = sum(
        len(encode_chunk(cut_chunk(b, cp_rank=r, cp_size=4, layout=layout), WIDE_MODEL))
        for row in step.grid
        for b in row
        for r in range(4)
    )
    padded = sum(len(batch) for row in step.grid for batch in row)
    assert body_bytes / padded < 9
    assert chunk_bytes / padded < 10
    assert tokens <= padded


def test_decoded_arrays_are_views_of_the_body() -> None:
    step = decode_step(encode_step(make_step(form="inline")))
    batch = step.grid[0][0]
    assert not batch.token_ids_L.flags.owndata
    assert not batch.token_ids_L.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        batch.token_ids_L[0] = 1


def test_special_floats_travel_bitwise() -> None:
    step = make_step(form=None, model=None)
    batch = step.grid[0][0]
    batch.logprobs_L[:3] = [np.float32("-inf"), np.float32("nan"), np.float32("-0.0")]
    decoded = decode_step(encode_step(step)).grid[0][0]
    assert decoded.logprobs_L.tobytes() == batch.logprobs_L.tobytes()
