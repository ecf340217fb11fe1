"""Logprobs of kept ids at a rank: aligned with the kept ids, absent ones told apart, or refused."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sideband.batch.chunks import cut_chunk
from sideband.batch.packing import PackingPlan, build_micro_batch
from sideband.batch.types import MicroBatch, Sample
from sideband.feed.assembly import Assembler, View
from sideband.feed.codec import encode_chunk, encode_step
from sideband.feed.errors import MalformedStep, RowsDisagree, StepFailed
from sideband.feed.messages import MicroBatchMessage
from sideband.feed.micro_batch import RankMicroBatch
from sideband.feed.pool import ReadPool
from sideband.feed.rank import RankFeed
from sideband.feed.reads import RetryPlan
from sideband.masks.rows import ScoreRows
from sideband.payload.root import PayloadRoot
from sideband.segments import AnySegment, InlineSegment, by_field
from sideband.testing.batches import WIDE_MODEL, make_sample, mask_segment, score_segment
from tests.unit.feed.builders import RUN, make_step
from tests.unit.feed.live import in_parallel, live_feed, plan_of, store

PLAN = PackingPlan(seq_len=64)


@pytest.fixture
def pool() -> Iterator[ReadPool]:
    threads = ReadPool(2)
    yield threads
    threads.close()


def assembled(pool: ReadPool, batch: MicroBatch) -> RankMicroBatch:
    chunk = cut_chunk(batch, cp_rank=0, cp_size=1, layout="contiguous")
    message = MicroBatchMessage(
        run_id="run",
        lineage=0,
        step=1,
        index=0,
        count=1,
        fields=("sampling_mask", "sampling_mask_logprobs"),
        model=WIDE_MODEL,
    )
    source = Assembler(View(), pool=pool, retry=RetryPlan(), make_source=lambda *_: None)
    return source.assemble(message, encode_chunk(chunk, WIDE_MODEL))


def sample_with(segments: list[AnySegment]) -> Sample:
    sample = make_sample(1, tokens=12, prompt_tokens=3, form="inline", with_masks=False)
    return replace(sample, segments=tuple(segments))


def test_kept_ids_that_nobody_scored_are_told_apart(pool: ReadPool) -> None:
    """One turn reported logprobs and another did not: NaN, which no engine can report."""
    segments = [mask_segment(1, 3, 12, form="inline"), score_segment(1, 6, 9, form="inline")]
    got = assembled(pool, build_micro_batch([sample_with(segments)], PLAN))
    assert got.mask_logprobs is not None
    row_M = np.repeat(np.arange(len(got)), np.diff(got.mask_starts))
    assert (np.isnan(got.mask_logprobs) == ~np.isin(row_M, [5, 6, 7])).all()  # about 6, 7 and 8
    scored = got.mask_logprobs[~np.isnan(got.mask_logprobs)]
    expected = score_segment(1, 6, 9, form="inline")
    assert isinstance(expected, InlineSegment)
    assert isinstance(expected.data, ScoreRows)
    assert scored.tolist() == expected.data.values_M.tolist()


def test_rows_of_another_length_than_their_kept_sets_are_refused_by_name(pool: ReadPool) -> None:
    other = score_segment(2, 3, 12, form="inline")  # another sequence's: other lengths
    segments = [mask_segment(1, 3, 12, form="inline"), other]
    with pytest.raises(RowsDisagree) as caught:
        assembled(pool, build_micro_batch([sample_with(segments)], PLAN))
    assert (caught.value.field, caught.value.follows) == (
        "sampling_mask_logprobs",
        "sampling_mask",
    )
    assert caught.value.row == 2  # the label of row 2 is the first sampled token
    assert caught.value.counts[0] != caught.value.counts[1]


def test_scores_travel_inline_bit_for_bit_or_are_refused() -> None:
    samples = [make_sample(i, tokens=9 + i, prompt_tokens=3, with_scores=True) for i in range(3)]
    step = make_step(samples=samples, form="inline", dp_size=1, cp_size=1)
    tree = msgspec.msgpack.decode(encode_step(step))
    inline = tree[8][0][0][11]
    place = [part[0] for part in inline].index("sampling_mask_logprobs")
    assert inline[place][2:4] == ["float32", [WIDE_MODEL.vocab_size]]
    from sideband.feed.codec import decode_step

    decode_step(msgspec.msgpack.encode(tree))
    values = inline[place][5]
    for bad, rule in (
        (values[:-4], "must hold"),
        (np.array([np.nan], "<f4").tobytes() + values[4:], "numbers below infinity"),
        (np.array([np.inf], "<f4").tobytes() + values[4:], "numbers below infinity"),
    ):
        inline[place][5] = bad
        with pytest.raises(MalformedStep, match=rule) as caught:
            decode_step(msgspec.msgpack.encode(tree))
        assert caught.value.element.endswith(".ids")


def first_step(rank: RankFeed) -> list[RankMicroBatch]:
    return list(next(iter(rank)))


@pytest.mark.parametrize("cp_size", [1, 2])
def test_inline_and_by_handle_give_the_same_scores(tmp_path: Path, cp_size: int) -> None:
    root = PayloadRoot.create(tmp_path, RUN, fresh=True)
    inline = [make_sample(i, tokens=11 + i, prompt_tokens=3, with_scores=True) for i in range(4)]
    digests = []
    for samples in (inline, [store(root, sample) for sample in inline]):
        step = make_step(samples=samples, form=samples[0].form, dp_size=1, cp_size=cp_size)
        with live_feed(plan_of(step)) as feed:
            feed.put(step)
            feed.do(lambda server: server.end())
            ranks = [feed.rank(0, cp, payload_root=tmp_path) for cp in range(cp_size)]
            batches = in_parallel([partial(first_step, rank) for rank in ranks])
        assert all(b.mask_logprobs is not None for own in batches for b in own)
        digests.append([[batch.digest() for batch in own] for own in batches])
    assert digests[0] == digests[1]


def test_a_file_whose_scores_are_of_other_rows_fails_the_step(tmp_path: Path) -> None:
    """Each section is intact, and they do not belong together: no rank trains on it."""
    root = PayloadRoot.create(tmp_path, RUN, fresh=True)
    samples = [
        store(root, make_sample(i, tokens=12, prompt_tokens=3, with_scores=True)) for i in (1, 2)
    ]
    own = [each for each in samples[0].segments if each.field != "sampling_mask_logprobs"]
    foreign = by_field(samples[1].segments, "sampling_mask_logprobs")
    crossed = replace(samples[0], segments=(*own, *foreign))
    step = make_step(samples=[crossed], dp_size=1, cp_size=1)
    with live_feed(plan_of(step)) as feed:
        feed.put(step)
        rank = feed.rank(0, 0, payload_root=tmp_path)
        with pytest.raises((RowsDisagree, StepFailed), match="sampling_mask"):
            list(next(iter(rank)))
