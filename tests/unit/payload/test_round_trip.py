"""What was written is what is read: any rows, range, block size, dtype and choice."""

from pathlib import Path
from typing import cast
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.masks.rows import MaskRows
from sideband.model import ModelShape
from sideband.payload import (
    ChoicePayload,
    MaskColumn,
    PayloadReader,
    PayloadRoot,
    RoutingRows,
    writer,
)
from sideband.payload import encodings as encodings_module
from sideband.payload.columns import RowArray
from sideband.payload.encodings import MASK_ENCODINGS, ROUTING_ENCODINGS, Encodings
from sideband.testing.payloads import random_choice, random_routing
from tests.unit.payload.support import (
    GAPS,
    NARROW,
    WIDE,
    clipped,
    make_root,
    of_field,
    one_choice,
    read_routing,
    rows_given,
    rows_read,
    write,
)


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> PayloadRoot:
    return make_root(tmp_path_factory.mktemp("shared") / "payloads")


@st.composite
def model_shapes(draw: st.DrawFn) -> ModelShape:
    id_space = draw(
        st.sampled_from([2, 5, 255, 256, 257, 512, 513, *(1 << bits for bits in range(10, 17))])
    )
    layers = draw(st.integers(1, 5))
    return ModelShape(
        num_layers=layers + 3,
        layer_ids=tuple(sorted(draw(st.sets(st.integers(0, layers + 2), min_size=1)))),
        top_k=draw(st.integers(1, min(4, id_space))),
        id_space=id_space,
        vocab_size=draw(st.sampled_from([1, 2, 3, 1000, 1 << 18, 151_936, 1 << 24])),
    )


@given(
    model=model_shapes(),
    seed=st.integers(0, 1 << 32),
    prompt_tokens=st.integers(1, 40),
    completion_tokens=st.integers(1, 30),
    block_bytes=st.sampled_from([1, 17, 64, 500, 256 * 1024]),
    choices=st.integers(1, 2),
    encodings=st.builds(
        Encodings,
        routing=st.sampled_from(list(ROUTING_ENCODINGS)),
        masks=st.sampled_from(list(MASK_ENCODINGS)),
    ),
    overlap_bytes=st.sampled_from([0, 1 << 60]),  # written while it is checked, or after
    data=st.data(),
)
def test_any_range_of_any_request_reads_back(
    shared_root: PayloadRoot,
    model: ModelShape,
    seed: int,
    prompt_tokens: int,
    completion_tokens: int,
    block_bytes: int,
    choices: int,
    encodings: Encodings,
    overlap_bytes: int,
    data: st.DataObject,
) -> None:
    tokens = prompt_tokens + completion_tokens
    prompt_start = data.draw(st.integers(0, tokens - 1), "prompt_start")
    gaps: set[int] = set()
    if model.top_k > 1 and prompt_start < tokens - 1:
        gaps = data.draw(st.sets(st.integers(prompt_start, tokens - 2), max_size=6), "gaps")
    rng = np.random.default_rng(seed)
    given_choices = [
        random_choice(
            rng,
            model,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            prompt_start=prompt_start,
            choice=7 * index,
            gaps=tuple(gaps),
        )
        for index in range(choices)
    ]
    with (
        patch.object(encodings_module, "BLOCK_BYTES_TARGET", block_bytes),
        patch.object(writer, "_OVERLAP_BYTES_MIN", overlap_bytes),
    ):
        report = write(shared_root, *given_choices, model=model, encodings=encodings)
    assert report.rows_invalid == len(gaps) * choices
    start = data.draw(st.integers(0, tokens), "start")
    stop = data.draw(st.integers(start, tokens), "stop")
    with PayloadReader(shared_root, model=model) as reader:
        for choice in given_choices:
            segments = report.segments[choice.choice]
            for field, rows in rows_given(choice, gaps=gaps).items():
                of_this = of_field(segments, field)
                assert rows_read(reader, of_this, choice) == rows
                inside = {pos: row for pos, row in rows.items() if start <= pos < stop}
                assert rows_read(reader, clipped(of_this, start, stop), choice) == inside


def test_segments_are_the_runs_between_gaps(root: PayloadRoot, reader: PayloadReader) -> None:
    report = write(root, one_choice())  # the kept set at position 13 is empty
    routing = of_field(report.segments[0], "routed_experts")
    assert [(s.pos, s.stop, s.row) for s in routing] == [(1, 3, 0), (4, 7, 2), (9, 15, 5)]
    assert report.rows_invalid == len(GAPS)
    masks = of_field(report.segments[0], "sampling_mask")
    assert [(s.pos, s.stop, s.row) for s in masks] == [(10, 13, 0), (14, 16, 3)]
    assert report.masks_empty == 1
    assert all(segment.check() for segment in report.segments[0])
    header = reader.header(report.file or "")
    assert [s.runs for s in header.sections] == [
        ((1, 0, 2), (4, 2, 3), (9, 5, 6)),
        ((10, 0, 3), (14, 3, 2)),
    ]
    assert header.sections[0].layer_ids == WIDE.layer_ids
    assert report.size_bytes == (root.path / (report.file or "")).stat().st_size


def test_a_file_with_many_whole_and_edge_blocks(root: PayloadRoot, reader: PayloadReader) -> None:
    model = ModelShape(
        num_layers=48, layer_ids=tuple(range(48)), top_k=8, id_space=128, vocab_size=151_936
    )
    choice = random_choice(
        np.random.default_rng(1), model, prompt_tokens=2000, completion_tokens=1000, kept_max=500
    )
    report = write(root, choice, model=model)
    header = reader.header(report.file or "")
    assert [section.block_count for section in header.sections] == [5, 2]
    rows = rows_given(choice)
    ranges = ((0, 3000), (1, 2), (682, 1365), (681, 2048), (2500, 2999), (2998, 3000))
    for field in ("routed_experts", "sampling_mask"):
        segments = of_field(report.segments[0], field)
        for start, stop in ranges:
            found = rows_read(reader, clipped(segments, start, stop), choice)
            assert found == {pos: row for pos, row in rows[field].items() if start <= pos < stop}


@pytest.mark.parametrize("vocab_size", [1, 2, 1000, 1 << 18, 1 << 24])
def test_no_replay_is_a_gap_and_one_id_and_the_whole_vocabulary_are_rows(
    root: PayloadRoot, reader: PayloadReader, vocab_size: int
) -> None:
    model = ModelShape(num_layers=1, layer_ids=(0,), top_k=1, id_space=2, vocab_size=vocab_size)
    whole = np.arange(vocab_size, dtype=np.int32)
    last = np.array([vocab_size - 1], np.int32)
    masks = MaskRows(
        np.array([0, 0, 1, 1 + vocab_size, 1 + vocab_size], np.int64), np.concatenate((last, whole))
    )
    column = MaskColumn(
        pos=5, masks=masks, sampled_token_ids_N=np.full(4, vocab_size - 1, np.int32)
    )
    report = write(root, ChoicePayload(choice=0, routing=None, masks=column), model=model)
    (segment,) = report.segments[0]
    assert (segment.pos, segment.stop, report.masks_empty) == (6, 8, 2)
    found = reader.read_masks(segment, column.sampled_token_ids_N[1:3])
    assert found.equals(masks.slice(1, 3))
    assert [len(found[row]) for row in range(2)] == [1, vocab_size]
    (one,) = clipped([segment], 6, 7)
    assert reader.read_masks(one, last)[0].tolist() == last.tolist()


@pytest.mark.parametrize("name", MASK_ENCODINGS)
def test_cost_grows_with_kept_ids_and_not_with_the_vocabulary(root: PayloadRoot, name: str) -> None:
    sizes = []
    for vocab_size in (1 << 17, (1 << 17) + 1, 1 << 18):
        model = ModelShape(num_layers=1, layer_ids=(0,), top_k=1, id_space=2, vocab_size=vocab_size)
        starts = np.arange(1001, dtype=np.int64) * 10
        ids = np.tile(np.arange(10, dtype=np.int32), 1000)
        column = MaskColumn(
            pos=0, masks=MaskRows(starts, ids), sampled_token_ids_N=np.zeros(1000, np.int32)
        )
        choice = ChoicePayload(choice=0, routing=None, masks=column)
        report = write(root, choice, model=model, encodings=Encodings(masks=name))
        sizes.append(report.size_bytes)
    assert 0 <= sizes[1] - sizes[0] <= 10_000 / 8
    assert 0 <= sizes[2] - sizes[1] <= 10_000 / 8
    assert sizes[2] < 1024 + 4 * 1001 + 10_000 * 18 / 8


def test_nothing_to_write_makes_no_file(root: PayloadRoot) -> None:
    nothing = ChoicePayload(choice=4, routing=None, masks=None)
    lost = ChoicePayload(
        choice=5, routing=RoutingRows(pos=0, rows_NLK=np.zeros((6, 2, 2), np.uint16)), masks=None
    )
    no_rows = ChoicePayload(
        choice=6,
        routing=RoutingRows(pos=0, rows_NLK=np.zeros((0, 2, 2), np.uint16)),
        masks=MaskColumn(pos=0, masks=MaskRows.empty(0), sampled_token_ids_N=np.zeros(0, np.int32)),
    )
    no_sets = ChoicePayload(
        choice=7,
        routing=None,
        masks=MaskColumn(pos=0, masks=MaskRows.empty(3), sampled_token_ids_N=np.zeros(3, np.int32)),
    )
    report = write(root, nothing, lost, no_rows, no_sets)
    assert (report.file, report.size_bytes, report.rows_invalid) == (None, 0, 6)
    assert report.masks_empty == 3
    assert report.segments == {4: (), 5: (), 6: (), 7: ()}
    assert list(root.path.iterdir()) == [root.path / ".sideband-root.json"]


def test_a_choice_without_rows_keeps_its_entry(root: PayloadRoot, reader: PayloadReader) -> None:
    nothing = ChoicePayload(choice=1, routing=None, masks=None)
    report = write(root, one_choice(), nothing)
    assert report.segments[1] == ()
    assert len(reader.header(report.file or "").sections) == 2


def test_rows_in_any_memory_order_are_stored_alike(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    rows = random_routing(np.random.default_rng(3), 20, WIDE)
    strided = np.repeat(rows, 2, axis=0)[::2]
    turned = np.asfortranarray(rows)
    for given_rows in cast("list[RowArray]", [strided, turned]):
        assert not given_rows.flags.c_contiguous
        choice = ChoicePayload(
            choice=0, routing=RoutingRows(pos=0, rows_NLK=given_rows), masks=None
        )
        (segment,) = write(root, choice).segments[0]
        assert np.array_equal(read_routing(reader, segment), rows)


def test_top_1_rows_of_zeros_are_real(root: PayloadRoot, reader: PayloadReader) -> None:
    model = ModelShape(num_layers=2, layer_ids=(0,), top_k=1, id_space=4, vocab_size=10)
    rows = np.zeros((3, 1, 1), np.uint8)
    choice = ChoicePayload(choice=0, routing=RoutingRows(pos=0, rows_NLK=rows), masks=None)
    report = write(root, choice, model=model)
    assert report.rows_invalid == 0
    assert np.array_equal(read_routing(reader, report.segments[0][0]), rows)


def test_each_write_of_one_request_is_a_file_of_its_own(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    first, second = write(root, one_choice(1)), write(root, one_choice(2))
    assert first.file != second.file
    assert Path(first.file or "").parent == Path(second.file or "").parent
    for seed, report in ((1, first), (2, second)):
        rows = rows_given(one_choice(seed), gaps=GAPS)["routed_experts"]
        assert rows_read(reader, of_field(report.segments[0], "routed_experts")) == rows


def test_a_reader_of_the_same_model_reads(root: PayloadRoot) -> None:
    report = write(root, one_choice(model=NARROW), model=NARROW)
    with PayloadReader(root, model=NARROW) as reader:
        assert reader.header(report.file or "").model == NARROW
