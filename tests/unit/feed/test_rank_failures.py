"""What ranks are told when rows, peers or settings fail them."""

import os
from functools import partial
from pathlib import Path

import pytest

from sideband.feed.errors import (
    FeedClosed,
    FeedTimeout,
    ModelMismatch,
    NoPayloadRoot,
    RankReadFailed,
    RankRefused,
    StepFailed,
    StepMissing,
    StepUnfinished,
)
from sideband.feed.rank import RankFeed
from sideband.feed.reads import RetryPlan
from sideband.ids import RunId
from sideband.testing.batches import NARROW_MODEL
from tests.unit.feed.builders import make_step
from tests.unit.feed.live import in_parallel, live_feed, plan_of, read_all, stored_samples

QUICK = RetryPlan(attempts_max=3, first_wait_s=0.01)


def test_one_failed_read_fails_the_step_on_every_rank_before_any_gets_it(tmp_path: Path) -> None:
    _, samples = stored_samples(tmp_path)
    step = make_step(samples=samples, dp_size=1, cp_size=2)
    good = make_step(step=2, form=None, dp_size=1, cp_size=2)
    for path in tmp_path.rglob("*.sbp"):
        if b"sample-000004" in path.read_bytes():
            path.unlink()
    with live_feed(plan_of(step)) as feed:
        ranks = [feed.rank(0, cp, payload_root=tmp_path, retry=QUICK) for cp in range(2)]
        feed.put(step)
        feed.put(good)
        errors = in_parallel([partial(error_of, rank) for rank in ranks])
        kinds = {type(error) for error in errors}
        assert RankReadFailed in kinds
        assert kinds <= {RankReadFailed, StepFailed}
        failed = next(error for error in errors if isinstance(error, RankReadFailed))
        assert "sample-000004" in failed.file
        assert failed.attempts == 3
        assert failed.rows[0] < failed.rows[1]
        feed.until(lambda delivery: delivery.failure is not None)
        assert "sample-000004" in feed.do(
            lambda s: (s.delivery.failure and s.delivery.failure.reason) or ""
        )
        with pytest.raises((StepFailed, RankReadFailed)):
            ranks[0].commit(1)


def error_of(rank: RankFeed) -> Exception:
    with pytest.raises((StepFailed, RankReadFailed)) as caught:
        read_all(rank)
    return caught.value


def test_a_restart_of_all_ranks_heals_a_failed_step(tmp_path: Path) -> None:
    _, samples = stored_samples(tmp_path)
    step = make_step(samples=samples, dp_size=1, cp_size=1)
    paths = sorted(tmp_path.rglob("*.sbp"))
    for path in paths:
        path.rename(path.with_suffix(".gone"))
    with live_feed(plan_of(step)) as feed:
        feed.put(step)
        feed.do(lambda server: server.end())
        broken = feed.rank(0, 0, payload_root=tmp_path, retry=QUICK)
        error_of(broken)
        broken.close()
        for path in paths:
            path.with_suffix(".gone").rename(path)
        assert read_all(feed.rank(0, 0, payload_root=tmp_path))
        feed.until(lambda delivery: delivery.is_drained)
        assert feed.do(lambda server: server.delivery.failure) is None


def test_a_file_that_appears_late_is_read_on_a_later_attempt(tmp_path: Path) -> None:
    _, samples = stored_samples(tmp_path)
    step = make_step(samples=samples, dp_size=1, cp_size=1, seq_len=64)  # one micro batch
    paths = sorted(tmp_path.rglob("*.sbp"))
    for path in paths:
        os.rename(path, path.with_suffix(".late"))
    with live_feed(plan_of(step)) as feed:
        retry = RetryPlan(attempts_max=2000, first_wait_s=0.01, wait_s_max=0.02)
        rank = feed.rank(0, 0, payload_root=tmp_path, retry=retry)
        feed.put(step)
        rank._link.wait(lambda s: (s.at is not None and not s.arrived) or None, "it", timeout_s=9)
        for path in paths:
            os.rename(path.with_suffix(".late"), path)
        assert rank.next_micro_batch() is not None


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"run_id": RunId("other")}, "other_run"),
        ({"global_rank": 7}, "unknown_rank"),
        ({"model": NARROW_MODEL}, "other_model"),
        ({"credit": 300}, "malformed"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused_by_name(options: dict[str, object], code: str) -> None:
    step = make_step(step=5, dp_size=1, cp_size=1)
    with live_feed(plan_of(step)) as feed:
        feed.put(step)
        with pytest.raises(RankRefused) as caught:
            feed.rank(0, 0, **options).next_micro_batch()
        assert caught.value.code == code


def test_a_trainer_of_another_model_fails_the_step(tmp_path: Path) -> None:
    step = make_step(form="inline", dp_size=1, cp_size=1)
    with live_feed(plan_of(step)) as feed:
        rank = feed.rank(0, 0, model=NARROW_MODEL)
        feed.until(lambda delivery: delivery.is_open)  # the feed has no step to compare with yet
        feed.put(step)
        with pytest.raises(ModelMismatch):
            rank.next_micro_batch()
        feed.until(lambda delivery: delivery.failure is not None)


def test_by_handle_without_a_payload_root_is_named(tmp_path: Path) -> None:
    step = make_step(dp_size=1, cp_size=1)
    with live_feed(plan_of(step)) as feed:
        feed.put(step)
        with pytest.raises(NoPayloadRoot):
            feed.rank(0, 0).next_micro_batch()


def test_steps_that_a_rank_never_got_are_missed_loudly() -> None:
    step = make_step(step=9, form=None, model=None, dp_size=1, cp_size=1)
    with live_feed(plan_of(step)) as feed:
        rank = feed.rank(0, 0, committed_step=3)
        feed.until(lambda delivery: delivery.is_open)
        feed.put(step)
        with pytest.raises(StepMissing) as caught:
            rank.next_micro_batch()
        assert (caught.value.expected, caught.value.got) == ((4, 0), (9, 0))


def test_going_on_in_the_middle_of_a_step_is_refused() -> None:
    step = make_step(form=None, model=None, dp_size=1, cp_size=1, seq_len=16)
    assert step.micro_batch_count > 1
    with live_feed(plan_of(step)) as feed:
        rank = feed.rank(0, 0)
        feed.put(step)
        steps = iter(rank)
        first = next(steps)
        assert len(first) == step.micro_batch_count
        next(iter(first))
        with pytest.raises(StepUnfinished):
            next(steps)
        with pytest.raises(StepUnfinished):
            first.commit()


def test_no_feed_at_all_is_a_named_timeout() -> None:
    with (
        RankFeed("tcp://127.0.0.1:9", dp_rank=0, cp_rank=0, threads=1, join_timeout_s=0.2) as rank,
        pytest.raises(FeedTimeout, match=r"no welcome from tcp://127\.0\.0\.1:9 yet"),
    ):
        rank.next_micro_batch()


def test_a_closed_rank_raises_and_leaves_no_thread_behind() -> None:
    step = make_step(form=None, model=None, dp_size=1, cp_size=1)
    with live_feed(plan_of(step)) as feed:
        rank = feed.rank(0, 0)
        feed.until(lambda delivery: delivery.is_open)
        rank.close()
        rank.close()
        with pytest.raises(FeedClosed):
            rank.next_micro_batch()
        feed.until(lambda delivery: delivery.ranks[0].connection is None)
        assert not rank._link._thread.is_alive()
        assert not rank._prefetcher._thread.is_alive()
        assert not any(thread.is_alive() for thread in rank._pool._threads)
