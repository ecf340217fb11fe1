"""Ranks and writers on a filesystem with faults: nothing wrong is read, then there is progress."""

from functools import partial
from pathlib import Path

import pytest

from sideband.errors import FeedError
from sideband.feed.codec import Step
from sideband.feed.errors import RankReadFailed, StepFailed
from sideband.feed.rank import RankFeed
from sideband.feed.reads import RetryPlan
from sideband.payload import PayloadReader
from sideband.payload.errors import WriteFailed
from sideband.payload.root import PayloadRoot
from tests.faults.filesystem import FaultyDisk
from tests.faults.seeds import Chance
from tests.unit.feed.builders import make_step
from tests.unit.feed.live import LiveFeed, in_parallel, live_feed, plan_of, read_all, stored_samples
from tests.unit.payload.support import make_root, write_one

GRID = [(dp, cp) for dp in range(2) for cp in range(2)]
PATIENT = RetryPlan(attempts_max=60, first_wait_s=0.001, wait_s_max=0.01)
Seen = list[tuple[int, int, str]]


def steps_of(folder: Path) -> tuple[list[Step], list[Step]]:
    """The same three steps inline and by handle."""
    inline, by_handle = stored_samples(folder)
    return (
        [make_step(step=s, samples=inline) for s in (1, 2, 3)],
        [make_step(step=s, samples=by_handle) for s in (1, 2, 3)],
    )


def trained(feed: LiveFeed, root: Path) -> list[Seen]:
    ranks = [feed.rank(dp, cp, payload_root=root, retry=PATIENT) for dp, cp in GRID]
    return in_parallel([partial(read_all, rank) for rank in ranks])


def truth(steps: list[Step], root: Path) -> list[Seen]:
    """What ranks get when nothing fails, from rows that were never in a file."""
    with live_feed(plan_of(steps[0])) as feed:
        for step in steps:
            feed.put(step)
        feed.do(lambda server: server.end())
        return trained(feed, root)


def test_files_that_come_late_short_or_stale_are_read_right_in_the_end(
    chance: Chance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline, by_handle = steps_of(tmp_path / "root")
    expected = truth(inline, tmp_path / "root")
    disk = FaultyDisk(chance, {"late": 0.3, "stale": 0.15, "short": 0.2})
    with live_feed(plan_of(by_handle[0])) as feed:
        for step in by_handle:
            feed.put(step)
        feed.do(lambda server: server.end())
        with monkeypatch.context() as patch:
            disk.install(patch)
            seen = trained(feed, tmp_path / "root")
        feed.until(lambda delivery: delivery.is_drained)
    assert seen == expected
    assert chance.injected


def test_a_flipped_bit_or_a_broken_disk_fails_the_step_and_is_never_trained_on(
    chance: Chance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generations of ranks fail until the disk is well; what any of them committed is right."""
    inline, by_handle = steps_of(tmp_path / "root")
    expected = truth(inline, tmp_path / "root")
    disk = FaultyDisk(chance, {"flip": 0.05, "eio": 0.02})
    committed: list[dict[tuple[int, int], str]] = [{} for _ in GRID]
    with live_feed(plan_of(by_handle[0])) as feed:
        for step in by_handle:
            feed.put(step)
        feed.do(lambda server: server.end())
        with monkeypatch.context() as patch:
            disk.install(patch)
            for generation in range(12):
                if generation == 10:
                    chance.calm()
                ranks = [feed.rank(dp, cp, payload_root=tmp_path / "root") for dp, cp in GRID]
                works = [
                    partial(train_until_failure, rank, into)
                    for rank, into in zip(ranks, committed, strict=True)
                ]
                failures = in_parallel(works)
                in_parallel([rank.close for rank in ranks])
                if not any(failures):
                    break
                assert {type(failure) for failure in failures if failure} <= {
                    RankReadFailed,
                    StepFailed,
                }, failures
        feed.until(lambda delivery: delivery.is_drained)
    assert [
        [(step, index, digest) for (step, index), digest in sorted(into.items())]
        for into in committed
    ] == expected
    assert chance.injected


def train_until_failure(rank: RankFeed, into: dict[tuple[int, int], str]) -> FeedError | None:
    """Digests of whole steps go into ``into``; a step whose commit was confirmed never comes again.

    A commit that raises may have reached the feed or not: such a step may come again, and the same.
    """
    confirmed = 0
    try:
        for step in rank:
            seen = {(batch.step, batch.index): batch.digest() for batch in step}
            assert step.step > confirmed
            assert all(into.get(place, digest) == digest for place, digest in seen.items())
            into.update(seen)
            step.commit()
            confirmed = step.step
    except (RankReadFailed, StepFailed) as exc:
        return exc
    return None


def test_a_write_is_whole_or_refused_and_leaves_nothing(
    chance: Chance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_root(tmp_path / "root")
    rates = {
        "torn": 0.4, "enospc": 0.1, "eio_write": 0.1, "slow_sync": 0.05, "eio_sync": 0.1,
        "eio_rename": 0.1,
    }  # fmt: skip
    disk = FaultyDisk(chance, rates)
    written, refused = {}, 0
    with monkeypatch.context() as patch:
        disk.install(patch)
        for serial in range(30):
            try:
                report = write_one(root, seed=serial, request_id=f"req-{serial}")
            except WriteFailed:
                refused += 1
            else:
                written[serial] = report
        assert not disk.names, "descriptors were left open"
    assert refused
    assert chance.injected
    assert len(written) + refused == 30
    files = {path.name for path in root.path.rglob("*") if path.is_file()}
    answered = {report.segments[0][0].file.rsplit("/", 1)[1] for report in written.values()}
    assert files == {".sideband-root.json", *answered}
    with PayloadReader(PayloadRoot.open(root.path, run_id=root.run_id), model=None) as reader:
        for report in written.values():
            reader.verify(report.segments[0][0].file)


def test_the_disk_strikes_only_payload_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk(Chance(0), dict.fromkeys(("late", "eio", "short", "enospc"), 1.0))
    with monkeypatch.context() as patch:
        disk.install(patch)
        (tmp_path / "other.txt").write_text("x")
        assert (tmp_path / "other.txt").read_text() == "x"
    assert not disk.chance.injected
