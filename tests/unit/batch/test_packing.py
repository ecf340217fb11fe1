"""Packing never loses, repeats or misaligns a token."""

import random
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.batch.columns import Runs
from sideband.batch.packing import PackingPlan, pack
from sideband.batch.types import MicroBatch, Sample, SequenceSpan
from sideband.errors import InvalidInput
from sideband.ids import SampleId
from sideband.segments import AnySegment, Field, PayloadSegment
from sideband.testing.batch_strategies import plans, sample_lists
from sideband.testing.batches import NARROW_MODEL, WIDE_MODEL, make_sample, rows_by_position

FIELDS: tuple[Field, ...] = ("routed_experts", "sampling_mask")


def all_of(grid: list[list[MicroBatch]]) -> list[MicroBatch]:
    return [micro_batch for rank in grid for micro_batch in rank]


def assert_sample_lies_at(span: SequenceSpan, sample: Sample, micro_batch: MicroBatch) -> None:
    assert (span.length, span.env_name) == (len(sample), sample.env_name)
    assert span.policy_version == sample.policy_version
    real = slice(span.start, span.start + span.length)
    assert np.array_equal(micro_batch.token_ids_L[real], sample.token_ids_T)
    assert np.array_equal(micro_batch.loss_mask_L[real], sample.loss_mask_T)
    assert np.array_equal(micro_batch.logprobs_L[real], sample.logprobs_T)
    for column in ("advantages", "temperatures"):
        packed = getattr(micro_batch, column).expand()[real]
        assert np.array_equal(packed, getattr(sample, column).expand())
    if sample.weight_versions is not None:
        assert micro_batch.weight_versions is not None
        packed = micro_batch.weight_versions.expand()[real]
        assert np.array_equal(packed, sample.weight_versions.expand())
    elif micro_batch.weight_versions is not None:
        assert set(micro_batch.weight_versions.expand()[real].tolist()) == {-1}


def assert_neutral(
    micro_batch: MicroBatch, pads: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> None:
    assert not micro_batch.token_ids_L[pads].any()
    assert not micro_batch.loss_mask_L[pads].any()
    assert not micro_batch.logprobs_L[pads].any()
    assert not micro_batch.advantages.expand()[pads].any()
    assert (micro_batch.temperatures.expand()[pads] == 1).all()
    if micro_batch.weight_versions is not None:
        assert (micro_batch.weight_versions.expand()[pads] == -1).all()


@given(sample_lists(), plans())
def test_every_token_and_row_of_every_sample_lies_at_its_place_once(
    samples: list[Sample], plan: PackingPlan
) -> None:
    left = {sample.sample_id: sample for sample in samples}
    for micro_batch in all_of(pack(samples, plan)):
        expected: dict[Field, dict[int, object]] = {field: {} for field in FIELDS}
        pads = np.ones(len(micro_batch), np.bool_)
        for span in micro_batch.spans:
            if span.sample_id is None:
                assert span.length == 0
                continue
            sample = left.pop(span.sample_id)  # a KeyError is a sample packed twice
            assert_sample_lies_at(span, sample, micro_batch)
            assert sample.form == micro_batch.form
            pads[span.start : span.start + span.length] = False
            for field in FIELDS:
                for t, row in rows_by_position(sample.segments, field).items():
                    expected[field][span.start + t] = row
        assert_neutral(micro_batch, pads)
        for field in FIELDS:
            assert rows_by_position(micro_batch.segments, field) == expected[field]
    assert not left


@given(sample_lists(), plans())
def test_spans_tile_and_pads_are_no_longer_than_the_layout_needs(
    samples: list[Sample], plan: PackingPlan
) -> None:
    for micro_batch in all_of(pack(samples, plan)):
        assert len(micro_batch) % plan.row_multiple == 0
        assert len(micro_batch) <= plan.seq_len
        bounds = [(span.start, span.stop) for span in micro_batch.spans]
        assert [0, *(stop for _, stop in bounds)] == [*(a for a, _ in bounds), len(micro_batch)]
        for span in micro_batch.spans:
            if span.sample_id is None:
                assert span.stop - span.start <= plan.row_multiple
            else:
                assert 0 <= span.stop - span.start - span.length < plan.sequence_multiple
                assert span.start % plan.sequence_multiple == 0


@given(sample_lists(max_size=20), plans())
def test_the_grid_is_even_and_padded_with_zero_loss_dummies(
    samples: list[Sample], plan: PackingPlan
) -> None:
    grid = pack(samples, plan)
    assert len(grid) == plan.dp_size
    assert len({len(rank) for rank in grid}) == 1
    dummies = [m for m in all_of(grid) if all(span.sample_id is None for span in m.spans)]
    assert len(dummies) < plan.dp_size or not samples
    for dummy in dummies:
        assert (len(dummy), len(dummy.spans)) == (plan.row_multiple, 1)
        assert dummy.form is None
        assert not dummy.segments
        assert not dummy.loss_mask_L.any()


def test_an_empty_step_is_one_dummy_per_rank() -> None:
    grid = pack([], PackingPlan(seq_len=8, dp_size=3))
    assert [len(rank) for rank in grid] == [1, 1, 1]


@given(sample_lists(max_size=20), plans(), st.randoms(use_true_random=False))
def test_equal_samples_in_any_order_give_equal_grids(
    samples: list[Sample], plan: PackingPlan, shuffler: random.Random
) -> None:
    shuffled = list(samples)
    shuffler.shuffle(shuffled)
    for rank, again in zip(pack(samples, plan), pack(shuffled, plan), strict=True):
        assert [m.spans for m in rank] == [m.spans for m in again]
        for one, other in zip(rank, again, strict=True):
            assert np.array_equal(one.token_ids_L, other.token_ids_L)
            for field in FIELDS:
                rows = rows_by_position(one.segments, field)
                assert rows == rows_by_position(other.segments, field)


def kind_of(segment: AnySegment) -> object:
    if isinstance(segment, PayloadSegment):
        return (segment.dtype, segment.shape)
    data = segment.data
    return (data.dtype, data.shape[1:]) if isinstance(data, np.ndarray) else None


@given(sample_lists(min_size=2, max_size=20), plans())
def test_a_micro_batch_never_mixes_forms_fields_dtypes_or_shapes(
    samples: list[Sample], plan: PackingPlan
) -> None:
    by_id = {sample.sample_id: sample for sample in samples}
    for micro_batch in all_of(pack(samples, plan)):
        members = [by_id[span.sample_id] for span in micro_batch.spans if span.sample_id]
        keys = {(m.form, frozenset(s.field for s in m.segments)) for m in members}
        assert len(keys) <= 1
        kinds = {(s.field, kind_of(s)) for s in micro_batch.segments}
        assert len(kinds) == len({field for field, _ in kinds})


def test_uint8_and_uint16_routing_of_one_run_pack_apart() -> None:
    """P32: a row's dtype is part of the bin's key, not of the largest id seen."""
    wide = [make_sample(n, tokens=4, form="handle", model=WIDE_MODEL) for n in range(2)]
    narrow = [make_sample(n + 9, tokens=4, form="handle", model=NARROW_MODEL) for n in range(2)]
    (micro_batches,) = pack([*wide, *narrow], PackingPlan(seq_len=64))
    assert len(micro_batches) == 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_bins_are_filled_first_fit_by_descending_length(size: int) -> None:
    lengths = [3, 7, 5, 4, 6, 2, 3][: 2 * size + 1]
    samples = [make_sample(n, tokens=length, form=None) for n, length in enumerate(lengths)]
    (micro_batches,) = pack(samples, PackingPlan(seq_len=10))
    expected: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fits = [bin_ for bin_ in expected if sum(bin_) + length <= 10]
        if fits:
            fits[0].append(length)
        else:
            expected.append([length])
    packed = sorted([span.length for span in m.spans] for m in micro_batches)
    assert packed == sorted(expected)


def test_zigzag_counts_the_pads_of_each_sequence_when_it_fills_a_row() -> None:
    """5 + 3 tokens fit a row of 8 by length, but not once each is padded to a multiple of 4."""
    samples = [make_sample(1, tokens=5), make_sample(2, tokens=3)]
    (micro_batches,) = pack(samples, PackingPlan(seq_len=8, cp_size=2, layout="zigzag"))
    assert [len(micro_batch) for micro_batch in micro_batches] == [8, 4]
    (contiguous,) = pack(samples, PackingPlan(seq_len=8, cp_size=2))
    assert [len(micro_batch) for micro_batch in contiguous] == [8]


def test_a_sample_with_masks_and_one_without_pack_apart_and_keep_their_rows() -> None:
    """P63: masks are per token; top-k and top-p of neighbours do not leak."""
    masked = make_sample(1, tokens=6, prompt_tokens=2)
    unmasked = make_sample(2, tokens=6, prompt_tokens=2, with_masks=False)
    (micro_batches,) = pack([masked, unmasked], PackingPlan(seq_len=64))
    rows = {
        m.spans[0].sample_id: rows_by_position(m.segments, "sampling_mask") for m in micro_batches
    }
    assert rows[masked.sample_id] == rows_by_position(masked.segments, "sampling_mask")
    assert rows[unmasked.sample_id] == {}


def test_samples_that_cannot_be_packed_are_refused() -> None:
    plan = PackingPlan(seq_len=8)
    long = make_sample(1, tokens=9)
    with pytest.raises(InvalidInput, match="truncate first"):
        pack([long], plan)
    twin = make_sample(2, tokens=4)
    with pytest.raises(InvalidInput, match="once"):
        pack([twin, twin], plan)


def with_changes(sample: Sample, **changes: object) -> Sample:
    return replace(sample, **changes)  # type: ignore[arg-type]  # the tests break samples on purpose


def test_a_sample_that_mixes_forms_or_lies_about_its_form_is_refused() -> None:
    plan = PackingPlan(seq_len=8)
    inline, handle = make_sample(1, tokens=4), make_sample(1, tokens=4, form="handle")
    mixed = with_changes(inline, segments=(inline.segments[0], *handle.segments[1:]))
    with pytest.raises(InvalidInput, match="one form"):
        pack([mixed], plan)
    with pytest.raises(InvalidInput, match="name its segments' form"):
        pack([with_changes(inline, form="handle")], plan)
    with pytest.raises(InvalidInput, match="name its segments' form"):
        pack([with_changes(inline, segments=())], plan)


def test_a_column_of_another_length_is_refused_and_never_broadcast() -> None:
    sample = make_sample(1, tokens=4)
    short = with_changes(sample, logprobs_T=np.zeros(1, np.float32))
    with pytest.raises(InvalidInput, match="every column"):
        pack([short], PackingPlan(seq_len=8))
    runs = with_changes(sample, advantages=Runs.of(np.ones(3, np.float32)))
    with pytest.raises(InvalidInput, match="every column"):
        pack([runs], PackingPlan(seq_len=8))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seq_len": 0}, "seq_len"),
        ({"dp_size": 0}, "dp_size"),
        ({"cp_size": -1}, "cp_size"),
        ({"pad_multiple": 0}, "pad_multiple"),
        ({"layout": "striped"}, "layout"),
        ({"seq_len": 10, "cp_size": 4}, "seq_len"),
        ({"seq_len": 12, "cp_size": 4, "layout": "zigzag"}, "seq_len"),
        ({"seq_len": 12, "cp_size": 4, "pad_multiple": 2}, "seq_len"),
    ],
)
def test_a_plan_that_cannot_be_cut_is_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        PackingPlan(**{"seq_len": 8, **changes})  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.field == field


def test_fifty_thousand_samples_pack_in_seconds() -> None:
    """The bound is loose for busy machines; a quadratic search would take minutes."""
    templates = [make_sample(n, tokens=2 + n % 60, form="handle") for n in range(120)]
    samples = [replace(templates[n % 120], sample_id=SampleId(f"s{n:06d}")) for n in range(50_000)]
    started_s = time.perf_counter()
    grid = pack(samples, PackingPlan(seq_len=4096, dp_size=8, cp_size=8, layout="zigzag"))
    assert time.perf_counter() - started_s < 20
    placed = sum(span.sample_id is not None for m in all_of(grid) for span in m.spans)
    assert placed == len(samples)
