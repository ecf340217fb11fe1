"""Reads rows of payload files on the read pool: grouped by file, retried, named when they fail.

Errors: RankReadFailed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from sideband.batch.rows import PlacedRows
from sideband.feed.errors import FeedClosed, RankReadFailed
from sideband.feed.layers import LayerChoice, RowArray, place_rows
from sideband.feed.pool import Job, ReadPool
from sideband.fields import FIELDS
from sideband.masks.rows import MaskRows, ScoreRows
from sideband.payload.errors import PayloadError
from sideband.segments import PayloadSegment

# One job's worth of rows: long enough to pay for a thread's wake-up, short enough that 32 threads
# share one long file. Edge blocks (256 KiB) are read twice at most, so about 6 % is wasted.
JOB_BYTES: Final = 4 << 20
RAGGED_ROWS_PER_JOB: Final = 8192

T = TypeVar("T")


class RowSource(Protocol):
    """What reads need of a payload reader; called from many threads."""

    def read_routing(self, segment: PayloadSegment, out: RowArray) -> None: ...
    def read_ragged(
        self, segment: PayloadSegment, sampled_token_ids_N: NDArray[np.int32]
    ) -> MaskRows | ScoreRows: ...
    def forget(self, file: str) -> None: ...
    def forget_all(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPlan:
    """Stale and short reads are repeated: ``attempts_max`` times, the waits doubling."""

    attempts_max: int = 8
    first_wait_s: float = 0.05
    wait_s_max: float = 2.0
    read_timeout_s: float = 300.0  # for all rows of one micro batch; a dead mount hangs in pread

    def wait_s(self, attempt: int) -> float:
        """How long to wait after attempt ``attempt`` (from 1)."""
        return min(self.wait_s_max, self.first_wait_s * 2.0 ** (attempt - 1))


class HandleReads:
    """Collects the reads of one micro batch and runs them."""

    def __init__(self, source: RowSource, pool: ReadPool, retry: RetryPlan) -> None:
        self._source, self._pool, self._retry = source, pool, retry
        self._parts: list[tuple[PayloadSegment, Callable[[], None]]] = []

    def routing(self, placed: Sequence[PlacedRows], out_NLK: RowArray, choice: LayerChoice) -> None:
        """Fill the rows of ``out_NLK`` that the segments have."""
        for rows in placed:
            segment = rows.segment
            assert isinstance(segment, PayloadSegment), "inline rows are not read"
            row_bytes = int(np.prod(segment.shape)) * np.dtype(segment.dtype).itemsize
            start = rows.start
            for part in split(segment, rows_max=max(1, JOB_BYTES // row_bytes)):
                self._add_routing(part, out_NLK[start : start + part.rows], choice)
                start += part.rows

    def _add_routing(self, segment: PayloadSegment, out_NLK: RowArray, choice: LayerChoice) -> None:
        def read() -> None:
            if choice.is_identity:
                self._source.read_routing(segment, out_NLK)
                return
            whole: RowArray = np.empty((segment.rows, *segment.shape), segment.dtype)
            self._source.read_routing(segment, whole)
            place_rows(whole, out_NLK, choice)

        self._parts.append((segment, read))

    def ragged(
        self, placed: Sequence[PlacedRows], token_ids_N: NDArray[np.int32]
    ) -> list[tuple[int, MaskRows | ScoreRows]]:
        """Rows of one ragged field with the first row of each part, complete once ``run`` returned.

        ``token_ids_N``: of each row of the chunk, the token that was sampled.
        """
        found: list[tuple[int, MaskRows | ScoreRows]] = []
        for rows in placed:
            segment = rows.segment
            assert isinstance(segment, PayloadSegment), "inline rows are not read"
            start = rows.start
            for part in split(segment, rows_max=RAGGED_ROWS_PER_JOB):
                self._add_ragged(part, start, token_ids_N[start : start + part.rows], found)
                start += part.rows
        return found

    def _add_ragged(
        self,
        segment: PayloadSegment,
        start: int,
        sampled_token_ids_N: NDArray[np.int32],
        found: list[tuple[int, MaskRows | ScoreRows]],
    ) -> None:
        def read() -> None:
            rows = self._source.read_ragged(segment, sampled_token_ids_N)
            found.append((start, rows))  # append is atomic

        self._parts.append((segment, read))

    def run(self) -> None:
        """Read everything that was asked for. Raises RankReadFailed, FeedTimeout, FeedClosed."""
        parts = sorted(self._parts, key=lambda part: _place_of(part[0]))
        jobs: list[Job] = []
        for _, group in groupby(parts, key=lambda part: part[0].file):
            jobs.extend(self._jobs_of(list(group)))
        self._pool.run(jobs, timeout_s=self._retry.read_timeout_s)

    def _jobs_of(self, parts: list[tuple[PayloadSegment, Callable[[], None]]]) -> list[Job]:
        """The reads of one file in the order of their bytes, as many jobs as they are worth."""
        jobs: list[Job] = []
        batch: list[tuple[PayloadSegment, Callable[[], None]]] = []
        batch_bytes = 0
        for part in parts:
            size = part[0].rows * int(np.prod(part[0].shape)) * np.dtype(part[0].dtype).itemsize
            if FIELDS[part[0].field].ragged is not None:  # the shape only bounds its rows
                size = part[0].rows * (JOB_BYTES // RAGGED_ROWS_PER_JOB)
            if batch and batch_bytes + size > JOB_BYTES:
                jobs.append(self._job(batch))
                batch, batch_bytes = [], 0
            batch.append(part)
            batch_bytes += size
        jobs.append(self._job(batch))
        return jobs

    def _job(self, parts: list[tuple[PayloadSegment, Callable[[], None]]]) -> Job:
        def run() -> None:
            for segment, read in parts:
                self._attempt(segment, read)

        return run

    def _attempt(self, segment: PayloadSegment, read: Callable[[], None]) -> None:
        attempt = 0
        while True:
            attempt += 1
            try:
                read()
            except PayloadError as exc:
                if not exc.is_retryable or attempt >= self._retry.attempts_max:
                    rows = (segment.row, segment.row + segment.rows)
                    raise RankReadFailed(
                        segment.file, rows=rows, attempts=attempt, reason=str(exc)
                    ) from exc
                self._source.forget(segment.file)
            else:
                return
            if self._pool.closing.wait(self._retry.wait_s(attempt)):
                raise FeedClosed("the feed was closed while a read was repeated")


def split(segment: PayloadSegment, *, rows_max: int) -> list[PayloadSegment]:
    """The segment in parts of at most ``rows_max`` rows, in order."""
    if segment.rows <= rows_max:
        return [segment]
    return [
        segment.narrowed(pos, min(pos + rows_max, segment.stop))
        for pos in range(segment.pos, segment.stop, rows_max)
    ]


def _place_of(segment: PayloadSegment) -> tuple[str, int, int]:
    return (segment.file, segment.offset, segment.row)
