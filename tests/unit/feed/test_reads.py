"""Reads on the pool: grouped, split, retried, bounded in time, named when they fail."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from sideband.batch.rows import PlacedRows
from sideband.errors import FeedError
from sideband.feed.errors import FeedClosed, FeedTimeout, RankReadFailed
from sideband.feed.layers import RowArray, choose_layers
from sideband.feed.pool import ReadPool
from sideband.feed.rank import RankFeed
from sideband.feed.reads import HandleReads, RetryPlan, RowSource, split
from sideband.ids import RunId
from sideband.masks.rows import MaskRows, ScoreRows
from sideband.model import ModelShape
from sideband.payload.errors import ChecksumMismatch, PayloadError, PayloadNotFound, StalePayload
from sideband.segments import PayloadSegment
from sideband.testing.batches import WIDE_MODEL, routing_segment
from tests.unit.feed.builders import make_step
from tests.unit.feed.live import live_feed, plan_of, stored_samples

CHOICE = choose_layers(WIDE_MODEL, layers=None, all_layers=False)
QUICK = RetryPlan(attempts_max=4, first_wait_s=0.001, read_timeout_s=5.0)


class Source:
    """Rows whose every value is their row number; faults come first, in order."""

    def __init__(self, *faults: PayloadError) -> None:
        self.faults, self.forgotten, self.read = list(faults), 0, []  # type: ignore[var-annotated]
        self.lock = threading.Lock()
        self.gate: threading.Event | None = None

    def read_routing(self, segment: PayloadSegment, out: RowArray) -> None:
        if self.gate is not None:
            self.gate.wait(10)
        with self.lock:
            if self.faults:
                raise self.faults.pop(0)
            self.read.append((segment.file, segment.row, segment.rows))
        out[...] = (segment.row + np.arange(segment.rows))[:, None, None]

    def read_ragged(
        self, segment: PayloadSegment, sampled_token_ids_N: NDArray[np.int32]
    ) -> MaskRows | ScoreRows:
        raise AssertionError("no masks here")

    def forget(self, file: str) -> None:
        self.forgotten += 1

    def forget_all(self) -> None:
        raise AssertionError("a step is more than these reads")


@pytest.fixture
def pool() -> Iterator[ReadPool]:
    threads = ReadPool(4)
    yield threads
    threads.close()


def placed(*ranges: tuple[int, int, int]) -> list[PlacedRows]:
    """(serial, first, last) as consecutive rows of one chunk."""
    found, start = [], 0
    for serial, first, last in ranges:
        segment = routing_segment(serial, first, last, form="handle")
        found.append(PlacedRows(start=start, segment=segment))
        start += last - first
    return found


def read(
    pool: ReadPool, source: Source, rows: list[PlacedRows], *, retry: RetryPlan = QUICK
) -> RowArray:
    out = np.zeros((rows[-1].stop, *WIDE_MODEL.row_shape), np.uint16)
    reads = HandleReads(source, pool, retry)
    reads.routing(rows, out, CHOICE)
    reads.run()
    return out


def test_rows_go_to_their_places_file_by_file(pool: ReadPool) -> None:
    source = Source()
    out = read(pool, source, placed((2, 0, 5), (1, 3, 6), (2, 7, 9)))
    expected = [*range(200, 205), *range(103, 106), *range(207, 209)]
    assert out[:, 0, 0].tolist() == expected
    by_file = [row for file, row, _ in source.read if "request-2" in file]
    assert by_file == sorted(by_file)


def test_long_segments_are_read_by_many_threads(
    pool: ReadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sideband.feed.reads.JOB_BYTES", 10 * WIDE_MODEL.row_size_bytes)
    source = Source()
    out = read(pool, source, placed((0, 0, 35)))
    assert out[:, 0, 0].tolist() == list(range(35))
    assert sorted(rows for *_, rows in source.read) == [5, 10, 10, 10]


def test_splitting_covers_every_row_once() -> None:
    segment = routing_segment(0, 3, 20, form="handle")
    assert isinstance(segment, PayloadSegment)
    parts = split(segment, rows_max=7)
    assert [(part.pos, part.row, part.rows) for part in parts] == [
        (3, 3, 7),
        (10, 10, 7),
        (17, 17, 3),
    ]
    assert split(segment, rows_max=17) == [segment]


def test_absent_and_stale_reads_are_repeated_after_reopening(pool: ReadPool) -> None:
    """A server that forgets names and handles: absent three times, stale once, then right."""
    absent = PayloadNotFound("v0/run/00/request-0.sbp")
    source = Source(absent, absent, StalePayload("v0/run/00/request-0.sbp"))
    out = read(pool, source, placed((0, 0, 3)))
    assert out[:, 0, 0].tolist() == [0, 1, 2]
    assert source.forgotten == 3


def test_after_the_last_attempt_file_rows_and_attempts_are_named(pool: ReadPool) -> None:
    source = Source(*[PayloadNotFound("v0/run/00/request-0.sbp")] * 9)
    with pytest.raises(RankReadFailed) as caught:
        read(pool, source, placed((0, 2, 5)))
    error = caught.value
    assert (error.file, error.rows, error.attempts) == ("v0/run/00/request-0.sbp", (2, 5), 4)
    assert isinstance(error.__cause__, PayloadNotFound)


def test_damage_is_not_repeated(pool: ReadPool) -> None:
    damaged = ChecksumMismatch("v0/run/00/request-0.sbp", block=3, offset=64)
    with pytest.raises(RankReadFailed, match="block 3") as caught:
        read(pool, Source(damaged), placed((0, 0, 3)))
    assert caught.value.attempts == 1


def test_a_read_that_hangs_ends_at_its_deadline(pool: ReadPool) -> None:
    source = Source()
    source.gate = threading.Event()
    try:
        with pytest.raises(FeedTimeout, match=r"1 reads of 1 did not come within 0\.1 s"):
            read(pool, source, placed((0, 0, 3)), retry=RetryPlan(read_timeout_s=0.1))
    finally:
        source.gate.set()


def test_closing_ends_a_read_and_its_repeats(pool: ReadPool) -> None:
    source = Source(*[PayloadNotFound("x")] * 999)
    retry = RetryPlan(attempts_max=999, first_wait_s=5, wait_s_max=5)
    timer = threading.Timer(0.05, pool.close)
    timer.start()
    with pytest.raises(FeedClosed):
        read(pool, source, placed((0, 0, 3)), retry=retry)
    timer.join()
    with pytest.raises(FeedClosed):
        pool.run([lambda: None], timeout_s=5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_a_job_is_raised_and_not_waited_for(pool: ReadPool) -> None:
    def crash() -> None:
        raise ZeroDivisionError

    with pytest.raises(RuntimeError, match="a read job crashed"):
        pool.run([crash], timeout_s=5)
    pool.run([], timeout_s=0)


def test_waits_double_up_to_their_bound() -> None:
    retry = RetryPlan(first_wait_s=0.1, wait_s_max=0.5)
    assert [retry.wait_s(n) for n in (1, 2, 3, 4, 9)] == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_a_rank_reads_the_rows_of_its_chunk_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at the reader: each routing row is read by exactly one CP rank."""
    _, samples = stored_samples(tmp_path, count=1)
    step = make_step(samples=samples, dp_size=1, cp_size=2, layout="zigzag")
    rows: dict[int, list[int]] = {0: [], 1: []}
    with live_feed(plan_of(step)) as feed:
        ranks = [feed.rank(0, cp, payload_root=tmp_path) for cp in range(2)]
        for cp, rank in enumerate(ranks):
            spy_on(rank, rows[cp])
        feed.put(step)
        for rank in ranks:
            assert rank.next_micro_batch() is not None
    assert not set(rows[0]) & set(rows[1])
    assert sorted(rows[0] + rows[1]) == list(range(len(samples[0]) - 1))


class CountingSource:
    """A reader that remembers which routing rows it was asked for."""

    def __init__(self, source: RowSource, rows: list[int]) -> None:
        self._source, self._rows = source, rows

    def read_routing(self, segment: PayloadSegment, out: RowArray) -> None:
        self._rows.extend(range(segment.row, segment.row + segment.rows))
        self._source.read_routing(segment, out)

    def read_ragged(
        self, segment: PayloadSegment, sampled_token_ids_N: NDArray[np.int32]
    ) -> MaskRows | ScoreRows:
        return self._source.read_ragged(segment, sampled_token_ids_N)

    def forget(self, file: str) -> None:
        self._source.forget(file)

    def forget_all(self) -> None:
        self._source.forget_all()


def spy_on(rank: RankFeed, rows: list[int]) -> None:
    assembler = rank._prefetcher._assembler
    make = assembler._make_source

    def counting(run_id: RunId, model: ModelShape) -> RowSource:
        source = make(run_id, model)
        assert source is not None
        return CountingSource(source, rows)

    assembler._make_source = counting


def test_errors_of_the_feed_have_one_root() -> None:
    assert issubclass(RankReadFailed, FeedError)
