"""Chunks tile the row, and a rank's arrays equal the whole row cut by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.batch.chunks import cut_chunk, pieces, positions_of
from sideband.batch.packing import PackingPlan, build_micro_batch, pack
from sideband.batch.rows import PlacedRows, input_rows_of, rank_rows, sampled_rows_of
from sideband.batch.types import Align, Chunk, Layout, MicroBatch, Piece, Sample, SequenceSpan
from sideband.errors import InvalidInput
from sideband.testing.batch_strategies import LAYOUTS, plans, sample_lists
from sideband.testing.batches import Row, make_sample, row_at, rows_by_position

ALIGNS: tuple[Align, ...] = ("next", "token")


def positions_by_hand(micro_batch: MicroBatch, rank: int, size: int, layout: Layout) -> list[int]:
    if layout == "contiguous":
        part = len(micro_batch) // size
        return list(range(len(micro_batch)))[rank * part : (rank + 1) * part]
    taken: list[int] = []
    for span in micro_batch.spans:
        parts = np.split(np.arange(span.start, span.stop), 2 * size)
        taken += [*parts[rank].tolist(), *parts[2 * size - 1 - rank].tolist()]
    return taken


def span_at(micro_batch: MicroBatch, position: int) -> SequenceSpan:
    return next(span for span in micro_batch.spans if span.start <= position < span.stop)


def described_by(micro_batch: MicroBatch, position: int, align: Align) -> int | None:
    """The packed position whose label, loss and mask stand at the row of ``position``."""
    span = span_at(micro_batch, position)
    described = position + (align == "next")
    return described if described < span.start + span.length else None


def placed_rows(placed: list[PlacedRows]) -> dict[int, Row]:
    rows: dict[int, Row] = {}
    for one in placed:
        for index in range(one.segment.rows):
            assert one.start + index not in rows
            rows[one.start + index] = row_at(one.segment, index)
    return rows


def assert_rows_equal_hand_cut(
    micro_batch: MicroBatch, chunk: Chunk, taken: list[int], align: Align
) -> None:
    rows = rank_rows(chunk, align)
    described = [described_by(micro_batch, position, align) for position in taken]
    dense = {
        "labels_N": (micro_batch.token_ids_L, -100),
        "loss_mask_N": (micro_batch.loss_mask_L, False),
        "logprobs_N": (micro_batch.logprobs_L, 0),
        "advantages_N": (micro_batch.advantages.expand(), 0),
        "temperatures_N": (micro_batch.temperatures.expand(), 1),
    }
    if micro_batch.weight_versions is None:
        assert rows.weight_versions_N is None
    else:
        dense["weight_versions_N"] = (micro_batch.weight_versions.expand(), -1)
    for name, (column, neutral) in dense.items():
        expected = [neutral if at is None else column[at] for at in described]
        assert np.array_equal(getattr(rows, name), np.array(expected, column.dtype)), name
        assert getattr(rows, name).dtype == column.dtype
    assert rows.positions_N.tolist() == taken
    assert np.array_equal(rows.input_ids_N, micro_batch.token_ids_L[taken])
    offsets = [position - span_at(micro_batch, position).start for position in taken]
    assert rows.position_ids_N.tolist() == offsets
    masks = rows_by_position(micro_batch.segments, "sampling_mask")
    expected_masks = {i: masks[at] for i, at in enumerate(described) if at in masks}
    assert placed_rows(sampled_rows_of(chunk, "sampling_mask", align)) == expected_masks


@given(sample_lists(max_size=8), plans(), st.sampled_from(ALIGNS))
def test_a_chunk_equals_the_whole_micro_batch_cut_by_hand(
    samples: list[Sample], plan: PackingPlan, align: Align
) -> None:
    for micro_batch in [m for rank in pack(samples, plan) for m in rank]:
        routing = rows_by_position(micro_batch.segments, "routed_experts")
        seen: list[int] = []
        for rank in range(plan.cp_size):
            chunk = cut_chunk(micro_batch, cp_rank=rank, cp_size=plan.cp_size, layout=plan.layout)
            taken = positions_by_hand(micro_batch, rank, plan.cp_size, plan.layout)
            assert len(taken) == len(micro_batch) // plan.cp_size
            assert_rows_equal_hand_cut(micro_batch, chunk, taken, align)
            expected = {i: routing[at] for i, at in enumerate(taken) if at in routing}
            assert placed_rows(input_rows_of(chunk, "routed_experts")) == expected
            seen += taken
        assert sorted(seen) == list(range(len(micro_batch)))


@given(sample_lists(max_size=8), plans())
def test_pieces_tile_the_row_and_each_token_travels_once_plus_one_per_edge(
    samples: list[Sample], plan: PackingPlan
) -> None:
    (micro_batch, *_) = pack(samples, plan)[0]
    travelled = np.zeros(len(micro_batch), np.int64)
    edges = 0
    for rank in range(plan.cp_size):
        chunk = cut_chunk(micro_batch, cp_rank=rank, cp_size=plan.cp_size, layout=plan.layout)
        assert len(chunk.token_ids_E) == len(positions_of(chunk.pieces, edges=True))
        for piece in chunk.pieces:
            travelled[piece.start : piece.stop] += 1
            span = span_at(micro_batch, piece.stop - 1)
            assert piece.has_edge == (piece.stop < span.start + span.length)
            edges += piece.has_edge
    assert (travelled == 1).all()
    most = 2 * plan.cp_size * len(micro_batch.spans) if plan.layout == "zigzag" else plan.cp_size
    assert edges <= most


@given(sample_lists(max_size=8), plans())
def test_every_rank_gets_the_global_boundaries(samples: list[Sample], plan: PackingPlan) -> None:
    (micro_batch, *_) = pack(samples, plan)[0]
    for rank in range(plan.cp_size):
        chunk = cut_chunk(micro_batch, cp_rank=rank, cp_size=plan.cp_size, layout=plan.layout)
        rows = rank_rows(chunk, "next")
        assert rows.cu_seqlens.dtype == np.int32
        assert rows.cu_seqlens.tolist() == [0, *(span.stop for span in micro_batch.spans)]
        assert rows.sequence_lengths_S.tolist() == [span.length for span in micro_batch.spans]


def one_sample(tokens: int, cp_size: int, layout: Layout) -> MicroBatch:
    plan = PackingPlan(seq_len=64, cp_size=cp_size, layout=layout)
    return build_micro_batch([make_sample(1, tokens=tokens)], plan)


@pytest.mark.parametrize(
    ("layout", "rank", "expected"),
    [
        ("contiguous", 0, [0, 1, 2, 3]),
        ("contiguous", 1, [4, 5, 6, 7]),
        ("zigzag", 0, [0, 1, 6, 7]),
        ("zigzag", 1, [2, 3, 4, 5]),
    ],
)
def test_eight_tokens_at_cp_2_in_both_layouts(
    layout: Layout, rank: int, expected: list[int]
) -> None:
    """P42: the layout is a parameter of the cut; data of one layout is never cut as the other."""
    chunk = cut_chunk(one_sample(8, 2, layout), cp_rank=rank, cp_size=2, layout=layout)
    assert rank_rows(chunk, "next").positions_N.tolist() == expected


def test_zigzag_pads_every_packed_sample_and_thd_pads_shift_no_row() -> None:
    """P40: alignment pads lie inside the boundaries, and the rows after them keep their place."""
    plan = PackingPlan(seq_len=64, cp_size=2, layout="zigzag")
    short, long = make_sample(1, tokens=5), make_sample(2, tokens=6)
    micro_batch = build_micro_batch([long, short], plan)
    assert [(s.start, s.stop, s.length) for s in micro_batch.spans] == [(0, 8, 6), (8, 16, 5)]
    rows = rows_by_position(micro_batch.segments, "routed_experts")
    assert sorted(rows) == [0, 1, 2, 3, 4, 8, 9, 10, 11]


def test_labels_and_masks_cross_a_chunks_edge_with_the_one_token_that_follows() -> None:
    micro_batch = one_sample(8, 2, "contiguous")
    chunk = cut_chunk(micro_batch, cp_rank=0, cp_size=2, layout="contiguous")
    assert chunk.pieces == (Piece(start=0, stop=4, has_edge=True),)
    rows = rank_rows(chunk, "next")
    assert rows.labels_N.tolist() == micro_batch.token_ids_L[1:5].tolist()
    assert rows.logprobs_N[3] == micro_batch.logprobs_L[4]
    masks = rows_by_position(micro_batch.segments, "sampling_mask")
    placed = placed_rows(sampled_rows_of(chunk, "sampling_mask", "next"))
    assert placed == {i: masks[i + 1] for i in range(4) if i + 1 in masks}
    assert 3 in placed, "the mask of the token behind the edge"
    last = cut_chunk(micro_batch, cp_rank=1, cp_size=2, layout="contiguous")
    assert last.pieces == (Piece(start=4, stop=8, has_edge=False),)
    assert rank_rows(last, "next").labels_N[-1] == -100


def test_under_next_the_mask_rows_read_are_those_after_the_chunks_start_up_to_its_edge() -> None:
    chunk = cut_chunk(one_sample(8, 2, "contiguous"), cp_rank=1, cp_size=2, layout="contiguous")
    (placed,) = sampled_rows_of(chunk, "sampling_mask", "next")
    assert (placed.start, placed.stop) == (0, 3)
    assert (placed.segment.pos, placed.segment.stop) == (5, 8)
    (as_is,) = sampled_rows_of(chunk, "sampling_mask", "token")
    assert (as_is.start, as_is.segment.pos, as_is.segment.stop) == (0, 4, 8)


def test_no_kept_set_leaks_into_the_last_row_of_the_sequence_before() -> None:
    """P63: a mask on a sequence's first token has no row to stand at under "next"."""
    plan = PackingPlan(seq_len=64)
    first, second = make_sample(1, tokens=4), make_sample(2, tokens=4, prompt_tokens=0)
    chunk = cut_chunk(
        build_micro_batch([first, second], plan), cp_rank=0, cp_size=1, layout="contiguous"
    )
    rows = placed_rows(sampled_rows_of(chunk, "sampling_mask", "next"))
    assert sorted(rows) == [0, 1, 2, 4, 5, 6]
    assert not rank_rows(chunk, "next").loss_mask_N[3]


def test_pads_and_dummies_train_nothing_and_have_no_rows() -> None:
    """P37, P38, P39: no row is made up for a pad; what fills it is the trainer's choice."""
    plan = PackingPlan(seq_len=64, cp_size=4, pad_multiple=2)
    for micro_batch in (
        build_micro_batch([make_sample(3, tokens=3)], plan),
        build_micro_batch([], plan),
    ):
        for rank in range(4):
            chunk = cut_chunk(micro_batch, cp_rank=rank, cp_size=4, layout="contiguous")
            rows = rank_rows(chunk, "next")
            pads = rows.positions_N >= micro_batch.spans[0].length
            assert (rows.labels_N[pads] == -100).all()
            assert not rows.loss_mask_N[pads].any()
            filled = [
                n for p in input_rows_of(chunk, "routed_experts") for n in range(p.start, p.stop)
            ]
            assert not pads[filled].any()


def span(start: int, stop: int, length: int) -> SequenceSpan:
    return SequenceSpan(
        start=start, stop=stop, length=length, sample_id=None, env_name="", policy_version=0
    )


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [span(0, 4, 4)],
        [span(0, 4, 4), span(5, 8, 3)],
        [span(0, 5, 4), span(4, 8, 3)],
        [span(0, 4, 4), span(4, 4, 0), span(4, 8, 4)],
        [span(0, 8, 9)],
        [span(0, 8, -1)],
        [span(1, 8, 7)],
        [span(0, 12, 12)],
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_spans_that_do_not_tile_the_row_are_refused(
    spans: list[SequenceSpan], layout: Layout
) -> None:
    with pytest.raises(InvalidInput, match="spans"):
        pieces(spans, row_tokens=8, cp_rank=0, cp_size=1, layout=layout)


def test_a_row_that_the_layout_cannot_divide_is_refused() -> None:
    spans = [span(0, 6, 6), span(6, 8, 2)]
    with pytest.raises(InvalidInput, match="multiple of 3"):
        pieces(spans, row_tokens=8, cp_rank=0, cp_size=3, layout="contiguous")
    with pytest.raises(InvalidInput, match="multiple of 4"):
        pieces(spans, row_tokens=8, cp_rank=0, cp_size=2, layout="zigzag")
    with pytest.raises(InvalidInput, match="cp_rank"):
        pieces(spans, row_tokens=8, cp_rank=2, cp_size=2, layout="contiguous")
