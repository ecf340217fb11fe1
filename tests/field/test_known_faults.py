"""Faults that others report and no other test of ours shows; small inputs, one sentence each.

Which test stands for which report: docs/known-faults-of-the-field.md.
"""

import inspect
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sideband import RankFeed
from sideband.batch.rollouts import samples_of
from sideband.batch.types import Turn
from sideband.feed.layers import choose_layers
from sideband.ids import RequestId, RolloutId, RunId
from sideband.masks.rows import MaskRows
from sideband.model import ModelShape
from sideband.payload.columns import ChoicePayload, MaskColumn, RoutingRows
from sideband.payload.errors import OtherRunPayload, PayloadError
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot
from sideband.payload.writer import WriteReport, write_payload
from sideband.segments import holes, merge_prefill_decode

RUN = RunId("run-1")


def model(
    *, layers: int = 2, top_k: int = 2, id_space: int = 8, vocab_size: int = 64
) -> ModelShape:
    """A model whose every layer routes."""
    return ModelShape(
        num_layers=layers,
        layer_ids=tuple(range(layers)),
        top_k=top_k,
        id_space=id_space,
        vocab_size=vocab_size,
    )


def rows_of(shape: ModelShape, count: int, first: int = 0) -> NDArray[Any]:
    """Valid rows; the largest id is ``first`` + count + top-k at most."""
    base = (first + np.arange(count)) % (shape.id_space - shape.top_k + 1)
    ids = base[:, None, None] + np.arange(shape.top_k)[None, None, :]
    return np.broadcast_to(ids, (count, *shape.row_shape)).astype(shape.row_dtype)


def write(
    root: PayloadRoot, shape: ModelShape, payload: ChoicePayload, name: str = "q"
) -> WriteReport:
    """One file of one choice."""
    return write_payload(
        root, policy_version=0, request_id=RequestId(name), model=shape, choices=[payload]
    )


def routing(shape: ModelShape, count: int, first: int = 0) -> ChoicePayload:
    """A choice with routing alone."""
    rows = RoutingRows(pos=0, rows_NLK=rows_of(shape, count, first))
    return ChoicePayload(choice=0, routing=rows, masks=None)


def read_back(root: PayloadRoot, shape: ModelShape, report: WriteReport) -> NDArray[Any]:
    """All routing rows of choice 0."""
    reader = PayloadReader(root, model=shape)
    parts = []
    for segment in report.segments[0]:
        out = np.zeros((segment.rows, *shape.row_shape), shape.row_dtype)
        reader.read_routing(segment, out)
        parts.append(out)
    reader.close()
    return np.concatenate(parts)


@pytest.fixture
def root(tmp_path: Path) -> PayloadRoot:
    """A fresh payload root."""
    return PayloadRoot.create(tmp_path / "root", RUN, fresh=True)


def test_more_rows_than_any_capture_buffer_are_written_and_read(root: PayloadRoot) -> None:
    shape = model(layers=3)
    report = write(root, shape, routing(shape, 70_001))
    np.testing.assert_array_equal(read_back(root, shape, report), rows_of(shape, 70_001))


def test_requests_with_small_and_large_ids_of_one_run_have_one_dtype(root: PayloadRoot) -> None:
    shape = model(id_space=512)
    small = write(root, shape, routing(shape, 150), "small")  # no id above 200
    large = write(root, shape, routing(shape, 150, first=300), "large")
    assert {s.dtype for r in (small, large) for s in r.segments[0]} == {"uint16"}
    np.testing.assert_array_equal(read_back(root, shape, large), rows_of(shape, 150, 300))


@pytest.mark.parametrize(("id_space", "dtype"), [(256, "uint8"), (257, "uint16")])
def test_the_id_space_decides_the_dtype_at_its_very_edge(
    root: PayloadRoot, id_space: int, dtype: str
) -> None:
    shape = model(id_space=id_space)
    report = write(root, shape, routing(shape, 1, first=id_space - 2))
    assert [s.dtype for s in report.segments[0]] == [dtype]
    assert int(read_back(root, shape, report).max()) == id_space - 1


@pytest.mark.parametrize("wrong_id", [256, 301])
def test_an_id_that_a_byte_would_wrap_is_refused_at_the_write(
    root: PayloadRoot, wrong_id: int
) -> None:
    shape = model(id_space=256)
    rows = np.zeros((2, *shape.row_shape), np.uint16)
    rows[..., 1] = wrong_id
    payload = ChoicePayload(choice=0, routing=RoutingRows(pos=0, rows_NLK=rows), masks=None)
    with pytest.raises(PayloadError):
        write(root, shape, payload)
    assert list(root.files(0)) == []


def test_rows_that_are_zero_in_one_layer_are_gaps_and_not_expert_zero(root: PayloadRoot) -> None:
    shape = model(layers=3, top_k=4)
    rows = rows_of(shape, 8).copy()
    rows[2:4, 1] = 0  # a pipeline stage that was not gathered
    rows[6] = 0  # a row that never ran
    payload = ChoicePayload(choice=0, routing=RoutingRows(pos=5, rows_NLK=rows), masks=None)
    report = write(root, shape, payload)
    assert report.rows_invalid == 3
    assert [(s.pos, s.stop) for s in report.segments[0]] == [(5, 7), (9, 11), (12, 13)]


def test_two_writers_of_one_request_never_meet(root: PayloadRoot) -> None:
    shape = model()
    start = threading.Barrier(8)

    def one(first: int) -> tuple[int, WriteReport]:
        start.wait(timeout=10)
        return first, write(root, shape, routing(shape, 300, first))

    with ThreadPoolExecutor(8) as pool:
        reports = list(pool.map(one, range(8)))
    assert len({report.file for _, report in reports}) == 8
    for first, report in reports:
        np.testing.assert_array_equal(read_back(root, shape, report), rows_of(shape, 300, first))


def masks(counts: list[int], vocab_size: int) -> tuple[MaskRows, NDArray[np.int32]]:
    """Rows that keep the first so many ids, and their sampled tokens."""
    starts = np.cumsum([0, *counts]).astype(np.int64)
    ids = np.concatenate([np.arange(n, dtype=np.int32) for n in counts])
    assert max(counts) <= vocab_size
    return MaskRows(starts, ids), np.array([max(0, n - 1) for n in counts], np.int32)


def test_no_mask_one_id_and_five_stay_different_through_a_file(root: PayloadRoot) -> None:
    shape = model()
    rows, tokens = masks([0, 1, 5], shape.vocab_size)
    column = MaskColumn(pos=7, masks=rows, sampled_token_ids_N=tokens)
    report = write(root, shape, ChoicePayload(choice=0, routing=None, masks=column))
    reader = PayloadReader(root, model=shape)
    found = [
        (s.pos + i, len(ids))
        for s in report.segments[0]
        for i, ids in enumerate(_rows(reader, s, tokens[s.pos - 7 : s.stop - 7]))
    ]
    reader.close()
    assert [each for each in found if each[1]] == [(8, 1), (9, 5)]


def _rows(
    reader: PayloadReader, segment: Any, tokens: NDArray[np.int32]
) -> list[NDArray[np.int32]]:
    read = reader.read_masks(segment, tokens)
    return [read[i] for i in range(len(read))]


def test_a_mask_that_lacks_its_sampled_token_is_refused_and_leaves_no_file(
    root: PayloadRoot,
) -> None:
    shape = model()
    rows, tokens = masks([2, 3], shape.vocab_size)
    column = MaskColumn(pos=1, masks=rows, sampled_token_ids_N=tokens + np.array([0, 1], np.int32))
    with pytest.raises(PayloadError, match="kept"):
        write(root, shape, ChoicePayload(choice=0, routing=None, masks=column))
    assert list(root.files(0)) == []


def test_writing_masks_costs_memory_for_kept_ids_and_not_for_the_vocabulary(
    root: PayloadRoot,
) -> None:
    """[rows, vocabulary] as bits would be 600 MB here."""
    shape = model(vocab_size=1 << 20)
    rows, tokens = masks([20] * 5000, shape.vocab_size)
    column = MaskColumn(pos=1, masks=rows, sampled_token_ids_N=tokens)
    tracemalloc.start()
    report = write(root, shape, ChoicePayload(choice=0, routing=None, masks=column))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 32 << 20
    assert report.size_bytes < 5000 * (4 + 20 * 2.5 + 1) + 4096, "4 B a token, 20 bits an id"


def turn(request_id: str, prompt: list[int], completion: list[int], segments: Any = ()) -> Turn:
    """A turn that trains all it sampled."""
    return Turn(
        request_id=RequestId(request_id),
        prompt_token_ids_P=np.array(prompt, np.int32),
        completion_token_ids_C=np.array(completion, np.int32),
        logprobs_C=np.zeros(len(completion), np.float32),
        sampled_C=np.ones(len(completion), np.bool_),
        temperature=1.0,
        is_truncating=False,
        segments=tuple(segments),
    )


def test_a_hole_where_a_cache_was_loaded_from_outside_is_seen_whole(root: PayloadRoot) -> None:
    """Rows [0, 512) were never run here: what a slot held before is not sent in their place."""
    shape = model()
    rows = RoutingRows(pos=512, rows_NLK=rows_of(shape, 100))
    report = write(root, shape, ChoicePayload(choice=0, routing=rows, masks=None))
    prompt, completion = [1] * 600, [2] * 13
    made = samples_of(
        RolloutId("r"),
        [turn("q", prompt, completion, report.segments[0])],
        env_name="",
        policy_version=0,
        advantage=1.0,
        model=shape,
    )
    assert holes(made.samples[0].segments, start=0, stop=612) == [(0, 512)]


def test_a_pair_without_prefills_rows_has_none_below_the_prompts_end(root: PayloadRoot) -> None:
    """A sidecar that forwards only the transfer parameters: the prompt's rows are gone, visibly."""
    shape = model()
    decode = write(root, shape, routing(shape, 12)).segments[0]
    merged = merge_prefill_decode((), decode, prompt_tokens=8)
    assert [(s.pos, s.stop) for s in merged] == [(8, 12)]


def test_what_travels_by_handle_does_not_grow_with_layers_nor_tokens(root: PayloadRoot) -> None:
    """A 48-layer model's 20,000 rows cost as many bytes on the wire as a small model's hundred."""
    sizes = []
    for name, shape, count in (
        ("small", model(), 100),
        ("large", model(layers=48, top_k=8), 20_000),
    ):
        report = write(root, shape, routing(shape, count), name)
        sizes.append(sum(len(str(segment)) for segment in report.segments[0]))
    assert abs(sizes[1] - sizes[0]) < 20
    assert max(sizes) < 400


def test_the_orchestrators_memory_does_not_grow_with_the_rows_in_files(root: PayloadRoot) -> None:
    """Four hundred rollouts of 400 tokens: what is held of them is the same for 1 and 88 layers."""
    peaks = []
    for name, shape in (("thin", model()), ("wide", model(layers=88, top_k=22, id_space=512))):
        segments = write(root, shape, routing(shape, 399), name).segments[0]
        tracemalloc.start()
        held = [
            samples_of(
                RolloutId(f"r{i}"),
                [turn("q", [1] * 300, [2] * 100, segments)],
                env_name="",
                policy_version=0,
                advantage=1.0,
                model=shape,
            ).samples
            for i in range(400)
        ]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(held) == 400
    assert max(peaks) < 1.1 * min(peaks)
    assert max(peaks) < 400 * 400 * 24, "24 B a token"


def test_a_file_of_another_run_is_refused_by_name(tmp_path: Path, root: PayloadRoot) -> None:
    shape = model()
    report = write(root, shape, routing(shape, 10))
    other = PayloadRoot.create(tmp_path / "other", RunId("run-2"), fresh=True)
    reader = PayloadReader(other, model=shape)
    with pytest.raises(OtherRunPayload, match="run-1"):
        reader.read_routing(
            report.segments[0][0], np.zeros((10, *shape.row_shape), shape.row_dtype)
        )
    reader.close()


def test_a_stage_is_told_which_layers_its_columns_are() -> None:
    """A stage without any routed layer gets no column, and sees that it got none."""
    shape = ModelShape(num_layers=6, layer_ids=(3, 5), top_k=2, id_space=8, vocab_size=64)
    assert choose_layers(shape, layers=(3, 4, 5), all_layers=False).layer_ids == (3, 5)
    assert choose_layers(shape, layers=(0, 1, 2), all_layers=False).layer_ids == ()
    assert choose_layers(shape, layers=(4, 5), all_layers=True).layer_ids == (4, 5)


def test_a_rank_reads_with_32_threads_unless_told_otherwise() -> None:
    assert inspect.signature(RankFeed).parameters["threads"].default == 32
