"""Ranks over real ZMQ: the same arrays in both forms, in order, once, with named failures."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sideband.batch.chunks import cut_chunk
from sideband.batch.rows import rank_rows
from sideband.batch.types import Align, Layout
from sideband.feed.errors import FeedTimeout
from sideband.feed.micro_batch import RankMicroBatch
from sideband.feed.rank import RankFeed
from tests.unit.feed.builders import make_step
from tests.unit.feed.live import WAIT_S, in_parallel, live_feed, plan_of, read_all, stored_samples

GRID = [(dp, cp) for dp in range(2) for cp in range(2)]


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "ipc"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_both_forms_give_every_rank_the_same_arrays(
    layout: Layout, endpoint: str, tmp_path: Path
) -> None:
    inline, by_handle = stored_samples(tmp_path / "root")
    seen = []
    for samples in (inline, by_handle):
        steps = [make_step(step=s, samples=samples, layout=layout) for s in (1, 2, 3)]
        address = endpoint if endpoint != "ipc" else f"ipc://{tmp_path}/feed.sock"
        with live_feed(plan_of(steps[0]), endpoint=address) as feed:
            ranks = [feed.rank(dp, cp, payload_root=tmp_path / "root") for dp, cp in GRID]
            for step in steps:
                feed.put(step)
            feed.do(lambda server: server.end())
            seen.append(in_parallel([partial(read_all, rank) for rank in ranks]))
            feed.until(lambda delivery: delivery.is_drained)
    assert seen[0] == seen[1]
    count = steps[0].micro_batch_count
    for rank_seen in seen[0]:
        assert [place[:2] for place in rank_seen] == [
            (step, index) for step in (1, 2, 3) for index in range(count)
        ]
    assert len({digest for rank_seen in seen[0] for *_, digest in rank_seen}) > 4


@pytest.mark.parametrize("align", ["next", "token"])
def test_a_rank_gets_the_rows_of_its_chunk(align: Align, tmp_path: Path) -> None:
    _, samples = stored_samples(tmp_path)
    step = make_step(samples=samples, dp_size=1, cp_size=1)
    with live_feed(plan_of(step)) as feed:
        rank = feed.rank(0, 0, payload_root=tmp_path, align=align)
        feed.put(step)
        batch = rank.next_micro_batch()
        assert batch is not None
    chunk = cut_chunk(step.grid[0][0], cp_rank=0, cp_size=1, layout="contiguous")
    rows = rank_rows(chunk, align)
    np.testing.assert_array_equal(batch.input_ids[0], rows.input_ids_N)
    np.testing.assert_array_equal(batch.labels[0], rows.labels_N)
    np.testing.assert_array_equal(batch.loss_mask[0], rows.loss_mask_N)
    assert batch.routed_experts is not None
    assert batch.routed_experts.shape == (1, len(batch), 3, 2)
    assert batch.routed_experts.dtype == np.uint16
    assert batch.layer_ids == (1, 2, 5)
    routed = sum(len(sample) - 1 for sample in samples if sample.sample_id in batch.sample_ids)
    assert batch.routing_valid.sum() == routed
    assert not batch.routed_experts[~batch.routing_valid].any()
    assert len(batch.mask_starts) == len(batch) + 1


def one_rank_step(tmp_path: Path) -> Callable[..., Iterator[RankMicroBatch]]:
    _, samples = stored_samples(tmp_path)
    step = make_step(samples=samples, dp_size=1, cp_size=1)

    def batches(**options: object) -> Iterator[RankMicroBatch]:
        with live_feed(plan_of(step)) as feed:
            rank = feed.rank(0, 0, payload_root=tmp_path, **options)
            feed.put(step)
            feed.do(lambda server: server.end())
            while (batch := rank.next_micro_batch()) is not None:
                yield batch

    return batches


def test_a_pipeline_stage_gets_its_layers_and_all_layers_on_request(tmp_path: Path) -> None:
    batches = one_rank_step(tmp_path)
    whole = list(batches())
    for batch, part in zip(whole, batches(layers=[4, 5, 6, 2]), strict=True):
        assert part.layer_ids == (5, 2)
        assert part.routed_experts is not None
        assert batch.routed_experts is not None
        np.testing.assert_array_equal(part.routed_experts, batch.routed_experts[:, :, [2, 1]])
    for batch, dense in zip(whole, batches(all_layers=True), strict=True):
        assert dense.layer_ids == tuple(range(7))
        assert dense.routed_experts is not None
        assert batch.routed_experts is not None
        np.testing.assert_array_equal(dense.routed_experts[:, :, [1, 2, 5]], batch.routed_experts)
        assert not dense.routed_experts[:, :, [0, 3, 4, 6]].any()
    for batch, stage in zip(whole, batches(all_layers=True, layers=[5, 0]), strict=True):
        assert stage.layer_ids == (5, 0)
        assert stage.routed_experts is not None
        assert batch.routed_experts is not None
        np.testing.assert_array_equal(stage.routed_experts[:, :, 0], batch.routed_experts[:, :, 2])


def test_spread_fills_rows_without_routing_with_distinct_experts(tmp_path: Path) -> None:
    batches = one_rank_step(tmp_path)
    for batch, spread in zip(batches(), batches(fill="spread"), strict=True):
        assert batch.routed_experts is not None
        assert spread.routed_experts is not None
        valid = batch.routing_valid
        np.testing.assert_array_equal(spread.routed_experts[valid], batch.routed_experts[valid])
        filled = spread.routed_experts[~valid]
        assert (filled[..., 0] != filled[..., 1]).all()
        assert len(np.unique(filled)) > filled.shape[0]
        assert filled.max() < 300


def test_nothing_comes_before_every_global_rank_is_there(tmp_path: Path) -> None:
    step = make_step(form=None, model=None)
    with live_feed(plan_of(step)) as feed:
        early = [feed.rank(dp, cp, step_timeout_s=0.5) for dp, cp in GRID[:3]]
        feed.put(step)
        feed.until(lambda delivery: len(delivery.ranks) == 3)
        early[0]._link.wait(lambda s: s.waiting_for == (3,) or None, "a pong", timeout_s=10)
        with pytest.raises(FeedTimeout, match=r"waits for ranks \[3\]") as caught:
            early[0].next_micro_batch()
        assert caught.value.waiting_for == (3,)
        late = feed.rank(1, 1)
        for rank in early:
            rank._step_timeout_s = WAIT_S
        first = in_parallel([rank.next_micro_batch for rank in [*early, late]])
        assert [batch is not None and batch.index for batch in first] == [0, 0, 0, 0]


def test_two_processes_of_one_data_rank_are_two_ranks() -> None:
    """CP siblings of one data rank announce the same dp_rank: the barrier must not open early."""
    step = make_step(form=None, model=None, dp_size=1, cp_size=2)
    with live_feed(plan_of(step)) as feed:
        first = feed.rank(0, 0, step_timeout_s=0.3)
        feed.put(step)
        with pytest.raises(FeedTimeout):
            first.next_micro_batch()
        first._step_timeout_s = WAIT_S
        in_parallel([first.next_micro_batch, feed.rank(0, 1).next_micro_batch])


def test_a_rank_that_lost_its_connection_goes_on_where_it_was() -> None:
    steps = [make_step(step=s, form=None, model=None, dp_size=1, cp_size=1) for s in (1, 2, 3)]
    with live_feed(plan_of(steps[0])) as feed:
        rank = feed.rank(0, 0, credit=1)
        feed.put(steps[0])
        first = rank.next_micro_batch()
        assert first is not None
        feed.do(lambda server: server.delivery.leave(server.delivery.ranks[0].connection or b""))
        for step in steps[1:]:
            feed.put(step)
        feed.do(lambda server: server.end())
        seen = [(first.step, first.index)]
        while (batch := rank.next_micro_batch()) is not None:
            seen.append((batch.step, batch.index))
        count = steps[0].micro_batch_count
        assert seen == [(s, i) for s in (1, 2, 3) for i in range(count)]


def test_a_restarted_rank_gets_what_it_has_not_committed() -> None:
    steps = [make_step(step=s, form=None, model=None, dp_size=1, cp_size=2) for s in (4, 5, 6)]
    with live_feed(plan_of(steps[0])) as feed:
        for step in steps:
            feed.put(step)
        feed.do(lambda server: server.end())
        old, other = feed.rank(0, 0), feed.rank(0, 1)
        works: list[Callable[[], object]] = [partial(take_step, old), partial(take_step, other)]
        in_parallel(works)
        old.close()
        feed.ranks.remove(old)
        new = feed.rank(0, 0)
        first, second = in_parallel([partial(read_all, new), partial(read_all, other)])
        assert {step for step, *_ in first} == {step for step, *_ in second} == {5, 6}
        assert first[0][:2] == (5, 0)


def take_step(rank: RankFeed) -> int:
    for step in rank:
        list(step)
        step.commit()
        return step.step
    raise AssertionError("the feed ended")


def test_a_second_process_with_the_same_rank_waits_and_is_told_why() -> None:
    step = make_step(form=None, model=None, dp_size=1, cp_size=1)
    with live_feed(plan_of(step)) as feed:
        first = feed.rank(0, 0)
        feed.until(lambda delivery: delivery.is_open)
        second = feed.rank(0, 0, join_timeout_s=1.0)
        with pytest.raises(FeedTimeout, match="rank_in_use: rank 0 is held by process"):
            second.next_micro_batch()
        feed.put(step)
        assert first.next_micro_batch() is not None


def test_credit_stops_the_sender() -> None:
    steps = [make_step(step=s, form=None, model=None, dp_size=1, cp_size=1) for s in (1, 2, 3)]
    with live_feed(plan_of(steps[0])) as feed:
        rank = feed.rank(0, 0, credit=1, prefetch=1)
        feed.until(lambda delivery: delivery.is_open)
        for step in steps:
            feed.put(step)
        feed.until(lambda delivery: delivery.ranks[0].seq_sent == 2)  # one assembled, one waits
        feed.do(lambda server: server.wake())
        assert feed.do(lambda server: server.delivery.ranks[0].seq_sent) == 2
        assert rank.next_micro_batch() is not None
        feed.until(lambda delivery: delivery.ranks[0].seq_sent == 3)
