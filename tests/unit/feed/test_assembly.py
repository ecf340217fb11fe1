"""What a rank assembles equals the whole micro batch cut by hand, in both forms and layouts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sideband.batch.chunks import cut_chunk, pieces
from sideband.batch.packing import PackingPlan, pack
from sideband.batch.types import Align, MicroBatch, Sample
from sideband.errors import InvalidInput
from sideband.feed.assembly import Assembler, View, join_rows
from sideband.feed.codec import encode_chunk
from sideband.feed.errors import MalformedStep, ModelMismatch, NoPayloadRoot
from sideband.feed.layers import RowArray, choose_layers
from sideband.feed.messages import MicroBatchMessage
from sideband.feed.micro_batch import RankMicroBatch
from sideband.feed.pool import ReadPool
from sideband.feed.reads import RetryPlan
from sideband.fields import SAMPLED_FIELDS, Field
from sideband.masks.rows import MaskRows, ScoreRows
from sideband.segments import Form, InlineSegment, PayloadSegment
from sideband.testing.batch_strategies import plans, sample_lists
from sideband.testing.batches import (
    NARROW_MODEL,
    WIDE_MODEL,
    make_sample,
    masks_of,
    routing_of,
    scores_of,
    token_ids_of,
)

FORMS: tuple[Form, ...] = ("inline", "handle")
ALIGNS: tuple[Align, ...] = ("next", "token")


class TestingRows:
    """The rows that ``sideband.testing.batches`` means by its handles, without any file."""

    __test__ = False

    def __init__(self) -> None:
        self.times_forgotten = 0

    def _positions(self, segment: PayloadSegment) -> tuple[int, NDArray[np.int64]]:
        serial = int(segment.file.split("-")[-1].removesuffix(".sbp"))
        return serial, np.arange(segment.row, segment.row + segment.rows) - 100 * serial

    def read_routing(self, segment: PayloadSegment, out: RowArray) -> None:
        serial, positions = self._positions(segment)
        out[...] = routing_of(serial, positions, WIDE_MODEL)

    def read_ragged(
        self, segment: PayloadSegment, sampled_token_ids_N: NDArray[np.int32]
    ) -> MaskRows | ScoreRows:
        token_ids_N = tokens_of(segment)
        assert sampled_token_ids_N.tolist() == token_ids_N.tolist()
        masks = masks_of(self._positions(segment)[0], token_ids_N, WIDE_MODEL)
        return masks if segment.field == "sampling_mask" else scores_of(masks)

    def forget(self, file: str) -> None:
        raise AssertionError(file)

    def forget_all(self) -> None:
        self.times_forgotten += 1


@pytest.fixture(scope="module")
def pool() -> Iterator[ReadPool]:
    threads = ReadPool(2)
    yield threads
    threads.close()


def tokens_of(segment: PayloadSegment) -> NDArray[np.int32]:
    """The tokens at the segment's positions of its own sequence."""
    serial, positions = TestingRows()._positions(segment)
    return token_ids_of(serial, positions, WIDE_MODEL)


def assembler(pool: ReadPool, view: View, *, has_root: bool = True) -> Assembler:
    return Assembler(
        view,
        pool=pool,
        retry=RetryPlan(),
        make_source=lambda *_: TestingRows() if has_root else None,
    )


def message_of(batch: MicroBatch) -> MicroBatchMessage:
    present = {segment.field for segment in batch.segments}
    return MicroBatchMessage(
        run_id="run",
        lineage=2,
        step=1,
        index=0,
        count=1,
        fields=tuple(sorted(present)),
        model=WIDE_MODEL,
    )


def assembled(
    pool: ReadPool, batch: MicroBatch, plan: PackingPlan, cp_rank: int, view: View
) -> RankMicroBatch:
    chunk = cut_chunk(batch, cp_rank=cp_rank, cp_size=plan.cp_size, layout=plan.layout)
    body = encode_chunk(chunk, WIDE_MODEL)
    return assembler(pool, view).assemble(message_of(batch), body)


def whole_rows(batch: MicroBatch) -> tuple[dict[int, bytes], dict[Field, dict[int, list[Any]]]]:
    """Each packed position's routing row, kept set and logprobs, row by row."""
    source, routing = TestingRows(), {}
    sampled: dict[Field, dict[int, list[Any]]] = {field: {} for field in SAMPLED_FIELDS}
    for segment in batch.segments:
        if segment.field == "routed_experts":
            rows: RowArray = np.empty((segment.rows, *WIDE_MODEL.row_shape), np.uint16)
            if isinstance(segment, InlineSegment):
                assert isinstance(segment.data, np.ndarray)
                rows[...] = segment.data
            else:
                source.read_routing(segment, rows)
            routing.update({segment.pos + i: row.tobytes() for i, row in enumerate(rows)})
        else:
            if isinstance(segment, PayloadSegment):
                found = source.read_ragged(segment, tokens_of(segment))
            else:
                assert isinstance(segment, InlineSegment)
                assert isinstance(segment.data, MaskRows | ScoreRows)
                found = segment.data
            own = sampled[segment.field]
            own.update({segment.pos + i: found[i].tolist() for i in range(len(found))})
    return routing, sampled


def assert_cut_by_hand(
    got: RankMicroBatch, batch: MicroBatch, positions: Sequence[int], align: Align
) -> None:
    routing, sampled = whole_rows(batch)
    kept, scores = sampled["sampling_mask"], sampled["sampling_mask_logprobs"]
    assert (got.mask_logprobs is not None) == bool(scores)
    ends = {
        p: span.start + span.length for span in batch.spans for p in range(span.start, span.stop)
    }
    assert got.packed_positions.tolist() == list(positions)
    assert got.routing_valid[0].tolist() == [p in routing for p in positions]
    for i, p in enumerate(positions):
        if got.routed_experts is not None:
            expected = routing.get(p, bytes(WIDE_MODEL.row_size_bytes))
            assert got.routed_experts[0, i].tobytes() == expected
        described = p + 1 if align == "next" else p
        wanted = kept.get(described, []) if described < ends[p] else []
        of_row = slice(got.mask_starts[i], got.mask_starts[i + 1])
        assert got.mask_ids[of_row].tolist() == wanted
        if got.mask_logprobs is not None:
            reported = scores.get(described) if described < ends[p] else []
            unknown = [True] * len(wanted) if reported is None else [False] * len(wanted)
            assert np.isnan(got.mask_logprobs[of_row]).tolist() == unknown
            assert reported is None or got.mask_logprobs[of_row].tolist() == reported


@given(
    samples=sample_lists(min_size=1, max_size=5, models=(WIDE_MODEL,), forms=("handle", "inline")),
    plan=plans(cp_size_max=4),
    align=st.sampled_from(ALIGNS),
)
def test_every_rank_assembles_its_part_of_the_whole(
    pool: ReadPool, samples: list[Sample], plan: PackingPlan, align: Align
) -> None:
    for row in pack(samples, plan):
        for batch in row:
            for cp_rank in range(plan.cp_size):
                parts = pieces(
                    batch.spans,
                    row_tokens=len(batch),
                    cp_rank=cp_rank,
                    cp_size=plan.cp_size,
                    layout=plan.layout,
                )
                positions = [p for part in parts for p in range(part.start, part.stop)]
                got = assembled(pool, batch, plan, cp_rank, View(align=align))
                assert_cut_by_hand(got, batch, positions, align)


@given(data=st.data(), plan=plans(cp_size_max=4), align=st.sampled_from(ALIGNS))
def test_inline_and_by_handle_agree_bitwise(
    pool: ReadPool, data: st.DataObject, plan: PackingPlan, align: Align
) -> None:
    shapes = [
        {
            "tokens": (tokens := data.draw(st.integers(2, 30))),
            "prompt_tokens": data.draw(st.integers(1, tokens - 1)),
            "gaps": data.draw(
                st.lists(st.tuples(st.integers(0, 9), st.integers(0, 29)), max_size=2)
            ),
        }
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    digests = []
    for form in FORMS:
        grid = pack([make_sample(i, form=form, **shape) for i, shape in enumerate(shapes)], plan)  # type: ignore[arg-type]  # drawn above
        digests.append(
            [
                assembled(pool, batch, plan, cp, View(align=align, fill="spread")).digest()
                for row in grid
                for batch in row
                for cp in range(plan.cp_size)
            ]
        )
    assert digests[0] == digests[1]


def one_batch(form: Form) -> MicroBatch:
    plan = PackingPlan(seq_len=16, dp_size=1, cp_size=1, layout="contiguous")
    return pack([make_sample(0, tokens=12, prompt_tokens=3, form=form)], plan)[0][0]


PLAN = PackingPlan(seq_len=16, dp_size=1, cp_size=1, layout="contiguous")


def test_a_header_that_keeps_a_field_back_is_refused(pool: ReadPool) -> None:
    batch = one_batch("inline")
    chunk = cut_chunk(batch, cp_rank=0, cp_size=1, layout="contiguous")
    message = replace_fields(message_of(batch), ("sampling_mask",))
    with pytest.raises(MalformedStep, match="routed_experts"):
        assembler(pool, View()).assemble(message, encode_chunk(chunk, WIDE_MODEL))


def replace_fields(message: MicroBatchMessage, fields: tuple[str, ...]) -> MicroBatchMessage:
    return msgspec.structs.replace(message, fields=fields)


@pytest.mark.parametrize("form", FORMS)
def test_masks_alone_and_routing_alone_are_fine(pool: ReadPool, form: Form) -> None:
    batch = one_batch(form)
    for field in ("sampling_mask", "routed_experts"):
        segments = tuple(segment for segment in batch.segments if segment.field == field)
        got = assembled(pool, replace(batch, segments=segments), PLAN, 0, View())
        assert (got.routed_experts is None) == (field == "sampling_mask")
        assert bool(len(got.mask_ids)) == (field == "sampling_mask")
        assert got.layer_ids == (() if field == "sampling_mask" else WIDE_MODEL.layer_ids)


def test_another_model_and_a_missing_root_are_named(pool: ReadPool) -> None:
    batch = one_batch("handle")
    chunk = cut_chunk(batch, cp_rank=0, cp_size=1, layout="contiguous")
    body = encode_chunk(chunk, WIDE_MODEL)
    with pytest.raises(ModelMismatch):
        assembler(pool, View(model=NARROW_MODEL)).assemble(message_of(batch), body)
    with pytest.raises(NoPayloadRoot):
        assembler(pool, View(), has_root=False).assemble(message_of(batch), body)
    assembler(pool, View(model=WIDE_MODEL)).assemble(message_of(batch), body)


def test_files_are_closed_when_a_step_is_read(pool: ReadPool) -> None:
    source, batch = TestingRows(), one_batch("handle")
    body = encode_chunk(cut_chunk(batch, cp_rank=0, cp_size=1, layout="contiguous"), WIDE_MODEL)
    rank = Assembler(View(), pool=pool, retry=RetryPlan(), make_source=lambda *_: source)
    seen = []
    for step, index in ((1, 0), (1, 1), (2, 0), (2, 1)):
        facts = {"step": step, "index": index, "count": 2}
        rank.assemble(msgspec.structs.replace(message_of(batch), **facts), body)
        seen.append(source.times_forgotten)
    assert seen == [0, 1, 1, 2]


@pytest.mark.parametrize("layers", [(7,), (-1,), (1, 1)])
def test_layers_that_the_model_does_not_have_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="layers"):
        choose_layers(WIDE_MODEL, layers=layers, all_layers=False)


def test_masks_join_by_position_and_not_by_arrival() -> None:
    late = MaskRows(np.array([0, 1, 3]), np.array([5, 1, 2], np.int32))
    early = MaskRows(np.array([0, 2]), np.array([7, 9], np.int32))
    joined = join_rows(MaskRows, [(3, late), (1, early)], rows=6)
    assert joined.starts_N.tolist() == [0, 0, 2, 2, 3, 5, 5]
    assert joined.ids_M.tolist() == [7, 9, 5, 1, 2]
    assert join_rows(MaskRows, [], rows=2).equals(MaskRows.empty(2))


def test_digests_tell_any_value_apart_and_forget_the_run(pool: ReadPool) -> None:
    batch = assembled(pool, one_batch("inline"), PLAN, 0, View())
    assert replace(batch, run_id="another").digest() == batch.digest()  # type: ignore[arg-type]  # a run id
    changed = batch.logprobs.copy()
    changed[0, 3] = -0.0
    for other in (
        replace(batch, logprobs=changed),
        replace(batch, step=2),
        replace(batch, mask_ids=batch.mask_ids.astype(np.int64)),
        replace(batch, env_names=("other",)),
    ):
        assert other.digest() != batch.digest()
