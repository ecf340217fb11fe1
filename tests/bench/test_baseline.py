"""Both sides of a comparison do the same work: the same rows come out of either."""

import numpy as np
import pytest

from bench.baseline.packing import decode_inline, encode_inline, pack_inline
from bench.ours import feed_side, orchestrator_side
from bench.rows.masks import decode, encode, from_lists, without_loops
from bench.rows.pack_encode import by_handle, inline_samples
from bench.workload import (
    NEMOTRON_SUPER,
    VOCAB_SIZE,
    kept_counts,
    kept_sets,
    lengths,
    routing_rows,
    sampled_tokens,
)
from sideband.batch.chunks import cut_chunk, positions_of
from sideband.batch.packing import PackingPlan
from sideband.batch.types import Layout
from sideband.feed.codec import decode_chunk, decode_step
from sideband.payload.encodings import MASK_ENCODINGS

Sequence = dict[str, tuple[bytes, ...]]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_both_forms_of_a_step_give_the_ranks_the_same_tokens(layout: Layout) -> None:
    plan = PackingPlan(seq_len=512, dp_size=2, cp_size=4, layout=layout)
    samples = by_handle(6, 150, NEMOTRON_SUPER)
    body = orchestrator_side(samples, plan, NEMOTRON_SUPER)
    inline = pack_inline(
        inline_samples(samples, NEMOTRON_SUPER), seq_len=512, dp_size=2, row_multiple=8
    )
    received = [decode_inline(message) for message in encode_inline(inline)]
    assert sequences_of_ours(body) == sequences_of_inline(received)


def sequences_of_ours(body: bytes) -> Sequence:
    """Each sample's columns, put together again from the messages of all CP ranks."""
    step = decode_step(body)
    messages = iter(feed_side(body))
    found: Sequence = {}
    for row in step.grid:
        for batch in row:
            tokens, logprobs, advantages = (np.zeros(len(batch), d) for d in ("i4", "f4", "f4"))
            mask = np.zeros(len(batch), np.bool_)
            for cp_rank in range(step.cp_size):
                chunk = decode_chunk(next(messages), step.model)
                whole = cut_chunk(batch, cp_rank=cp_rank, cp_size=step.cp_size, layout=step.layout)
                at = positions_of(whole.pieces, edges=True)
                tokens[at], logprobs[at] = chunk.token_ids_E, chunk.logprobs_E
                mask[at], advantages[at] = chunk.loss_mask_E, chunk.advantages.expand()
            for span in batch.spans:
                if span.sample_id is not None:
                    real = slice(span.start, span.start + span.length)
                    columns = (tokens, logprobs, mask, advantages)
                    found[span.sample_id] = tuple(column[real].tobytes() for column in columns)
    return found


def sequences_of_inline(grid: list) -> Sequence:  # type: ignore[type-arg]  # rows of the baseline
    found: Sequence = {}
    for row in grid:
        for batch in row:
            columns = (
                np.array(batch.input_ids, np.int32),
                np.array(batch.logprobs, np.float32),
                np.array(batch.loss_mask, np.bool_),
                np.array(batch.advantages, np.float32),
            )
            start = 0
            for sample_id, length in zip(batch.sample_ids, batch.sequence_lengths, strict=True):
                real = slice(start, start + length)
                found[sample_id] = tuple(column[real].tobytes() for column in columns)
                start += length
    return found


def test_the_baseline_carries_every_routing_row() -> None:
    samples = by_handle(3, 100, NEMOTRON_SUPER)
    inline = inline_samples(samples, NEMOTRON_SUPER)
    grid = pack_inline(inline, seq_len=256, dp_size=1, row_multiple=8)
    (received,) = (decode_inline(message) for message in encode_inline(grid))
    for batch in received:
        rows = batch.routing.array()
        assert len(rows) % 8 == 0
        start = 0
        for sample_id, length in zip(batch.sample_ids, batch.sequence_lengths, strict=True):
            serial = next(i for i, sample in enumerate(samples) if sample.sample_id == sample_id)
            expected = routing_rows(NEMOTRON_SUPER, length, seed=serial)
            assert np.array_equal(rows[start : start + length], expected)
            start += length
        assert not rows[start:].any()


@pytest.mark.parametrize("name", list(MASK_ENCODINGS))
def test_every_way_of_masks_gives_the_same_rows(name: str) -> None:
    masks = kept_sets(400, vocab_size=VOCAB_SIZE, seed=1)
    sampled = sampled_tokens(masks, seed=2)
    encoding = MASK_ENCODINGS[name]
    blocks = encode(masks, sampled, encoding)
    assert decode(blocks, sampled, encoding).equals(masks)
    assert without_loops(lambda: decode(blocks, sampled, encoding)).equals(masks)
    assert from_lists([masks[row].tolist() for row in range(len(masks))]).equals(masks)


def test_kept_sets_are_like_those_of_real_runs() -> None:
    counts = kept_counts(200_000, seed=0)
    assert abs(counts.mean() - 8) < 0.4
    assert np.median(counts) == 2
    assert abs(np.percentile(counts, 99) - 82) < 4
    assert abs(np.mean(counts == 1) - 0.46) < 0.01


def test_the_sampled_token_is_kept() -> None:
    masks = kept_sets(300, vocab_size=1000, seed=2)
    sampled = sampled_tokens(masks, seed=2)
    assert all(sampled[row] in masks[row] for row in range(len(masks)))


@pytest.mark.parametrize("count", [1, 100, 100_000])
def test_lengths_add_up_and_no_sample_bears_the_rounding_of_all(count: int) -> None:
    drawn = lengths(count, mean=450, seed=1)
    assert sum(drawn) == count * 450
    assert min(drawn) > 0
    assert max(drawn) <= 2 * 450
