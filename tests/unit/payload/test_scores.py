"""Logprobs of kept ids in a payload file: beside their kept sets, row for row."""

import json
import secrets
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sideband.engines.inline import segments_of
from sideband.masks.rows import MaskRows, ScoreRows
from sideband.payload import ChoicePayload, MaskColumn, PayloadReader, PayloadRoot, refusals
from sideband.payload.errors import SegmentMismatch, UnsupportedEncoding
from sideband.segments import InlineSegment, PayloadSegment, by_field
from sideband.testing.payloads import random_choice
from tests.unit.payload.support import (
    WIDE,
    all_files,
    make_root,
    read_routing,
    sampled_tokens,
    write,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "payload-v1-mask-logprobs.sbp"
KEPT = [[7, 999], [], [5]]
SAMPLED = [999, 3, 5]
SCORES = [-1.5, -0.25, 0.0]


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> PayloadRoot:
    return make_root(tmp_path_factory.mktemp("scores") / "payloads")


def choice_of(scores: list[float]) -> ChoicePayload:
    starts = np.cumsum([0, *map(len, KEPT)]).astype(np.int64)
    ids = np.array([token_id for row in KEPT for token_id in row], np.int32)
    column = MaskColumn(
        pos=4,
        masks=MaskRows(starts, ids),
        sampled_token_ids_N=np.array(SAMPLED, np.int32),
        logprobs_M=np.array(scores, np.float32),
    )
    return ChoicePayload(choice=0, routing=None, masks=column)


def read_scores(
    reader: PayloadReader, segment: PayloadSegment, choice: ChoicePayload
) -> dict[int, bytes]:
    found = reader.read_ragged(segment, sampled_tokens(choice, segment))
    assert isinstance(found, ScoreRows)
    return {segment.pos + index: found[index].tobytes() for index in range(len(found))}


@given(seed=st.integers(0, 1 << 32), completion_tokens=st.integers(1, 40), data=st.data())
def test_any_range_of_scores_comes_back_and_lies_where_the_kept_sets_lie(
    shared_root: PayloadRoot, seed: int, completion_tokens: int, data: st.DataObject
) -> None:
    choice = random_choice(
        np.random.default_rng(seed),
        WIDE,
        prompt_tokens=3,
        completion_tokens=completion_tokens,
        with_scores=True,
    )
    assert choice.masks is not None
    segments = write(shared_root, choice).segments[0]
    scores = by_field(segments, "sampling_mask_logprobs")
    masks = by_field(segments, "sampling_mask")
    assert [(s.pos, s.rows) for s in scores] == [(s.pos, s.rows) for s in masks]
    given_rows = choice.masks.scores
    assert given_rows is not None
    inline = segments_of(choice, WIDE)
    places = [(segment.field, segment.pos, segment.rows) for segment in segments]
    assert [(segment.field, segment.pos, segment.rows) for segment in inline] == places
    with PayloadReader(shared_root, model=WIDE) as reader:
        for segment in scores:
            start = data.draw(st.integers(segment.pos, segment.stop - 1))
            stop = data.draw(st.integers(start + 1, segment.stop))
            found = read_scores(reader, segment.narrowed(start, stop), choice)
            assert found == {p: given_rows[p - 3].tobytes() for p in range(start, stop)}
        for one, other in zip(scores, by_field(inline, "sampling_mask_logprobs"), strict=True):
            assert isinstance(other.data, ScoreRows)
            assert other.data.equals(reader.read_ragged(one, sampled_tokens(choice, one)))


def test_many_blocks_of_scores_are_read_as_one(root: PayloadRoot, reader: PayloadReader) -> None:
    """A long completion with large kept sets takes more than one block of 256 KiB."""
    choice = random_choice(
        np.random.default_rng(5),
        WIDE,
        prompt_tokens=1,
        completion_tokens=700,
        kept_max=400,
        with_scores=True,
    )
    report = write(root, choice)
    assert report.file is not None
    section = reader.header(report.file).sections[-1]
    assert (section.field, section.encoding) == ("sampling_mask_logprobs", "csr-f32")
    assert section.block_count > 1
    assert choice.masks is not None
    given_rows = choice.masks.scores
    assert given_rows is not None
    found: dict[int, bytes] = {}
    for segment in by_field(report.segments[0], "sampling_mask_logprobs"):
        found |= read_scores(reader, segment, choice)
    assert found == {1 + i: given_rows[i].tobytes() for i in range(700) if len(given_rows[i])}


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ([-1.5, -0.25], "2 logprobs for 3 kept ids"),
        ([-1.5, -0.25, 0.0, 0.0], "4 logprobs for 3 kept ids"),
        ([-1.5, float("nan"), 0.0], "position 4 has one that is not below infinity"),
        ([-1.5, -0.25, float("inf")], "position 6 has one that is not below infinity"),
        ([-1.5, -float("inf"), 0.0], "position 4 gives -inf to its sampled token"),
    ],
)
def test_scores_that_no_sampling_has_are_refused(
    root: PayloadRoot, scores: list[float], reason: str
) -> None:
    with pytest.raises(refusals.MalformedScores, match=reason):
        write(root, choice_of(scores))
    assert not all_files(root)


def test_an_id_that_was_kept_and_is_never_drawn_is_minus_infinity(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    choice = choice_of([-float("inf"), 0.0, 0.0])
    first, _ = by_field(write(root, choice).segments[0], "sampling_mask_logprobs")
    assert read_scores(reader, first, choice) == {4: np.array([-np.inf, 0.0], np.float32).tobytes()}


def test_a_segment_of_one_field_never_reads_another(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    choice = choice_of(SCORES)
    segments = write(root, choice).segments[0]
    (masks, _), (scores, _) = (
        by_field(segments, "sampling_mask"),
        by_field(segments, "sampling_mask_logprobs"),
    )
    tokens = sampled_tokens(choice, scores)
    with pytest.raises(SegmentMismatch):
        reader.read_masks(scores, tokens)
    with pytest.raises(SegmentMismatch):
        read_routing(reader, scores)
    crossed = msgspec.structs.replace(scores, offset=masks.offset)
    with pytest.raises(SegmentMismatch):
        reader.read_ragged(crossed, tokens)


def test_an_unknown_encoding_of_scores_is_refused_when_it_is_read(
    root: PayloadRoot, reader: PayloadReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sideband.payload import rows

    choice = choice_of(SCORES)
    scores = by_field(write(root, choice).segments[0], "sampling_mask_logprobs")[0]
    monkeypatch.setattr(rows, "SCORE_ENCODINGS", {})
    with pytest.raises(UnsupportedEncoding):
        read_scores(reader, scores, choice)


def test_inline_scores_are_the_rows_that_the_file_holds() -> None:
    inline = by_field(segments_of(choice_of(SCORES), WIDE), "sampling_mask_logprobs")
    assert all(isinstance(segment, InlineSegment) for segment in inline)
    assert [(s.pos, s.data.values_M.tolist()) for s in inline if isinstance(s.data, ScoreRows)] == [
        (4, [-1.5, -0.25]),
        (6, [0.0]),
    ]


def test_the_writer_still_makes_exactly_the_golden_bytes(
    root: PayloadRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda count: "000102030405060f"[: 2 * count])
    report = write(root, choice_of(SCORES))
    assert report.file is not None
    assert (root.path / report.file).read_bytes() == GOLDEN.read_bytes()


def test_the_golden_file_is_what_the_page_says_without_our_code() -> None:
    data = GOLDEN.read_bytes()
    (header_bytes,) = struct.unpack_from("<I", data, 12)
    header = json.loads(data[32 : 32 + header_bytes])
    scores = header["sections"][-1]
    assert (scores["field"], scores["encoding"], scores["dtype"], scores["shape"]) == (
        "sampling_mask_logprobs",
        "csr-f32",
        "float32",
        [1000],
    )
    assert scores["runs"] == header["sections"][0]["runs"] == [[4, 0, 1], [6, 1, 1]]
    stored = data[scores["offset"] :]
    assert stored == struct.pack("<3I3f", 0, 2, 3, *SCORES)
    entry = struct.unpack_from("<QIIQ", data, 32 + header_bytes + 24)
    assert entry == (scores["offset"], len(stored), 2, xxhash.xxh3_64_intdigest(stored))
