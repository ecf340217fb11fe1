"""Acts on the payload root: deletes what retention gave up, sweeps, checks segments.

``Files`` owns a bounded pool of threads: the event loop never waits for the filesystem. A delete
that fails is tried again a few times and then left to the sweep, counted. Deleting twice is
harmless, so a crash between a decision and its deletion costs an orphan, never a needed file.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import structlog

from services.orchestrator.errors import ModelMismatch, SegmentNotInFile
from services.orchestrator.limits import (
    DELETE_ATTEMPTS_MAX,
    RETRY_WAIT_S_MAX,
)
from services.orchestrator.metrics import Metrics
from services.orchestrator.sweep import VersionPlan, plan_version
from sideband.errors import PayloadError
from sideband.payload.errors import OtherModelPayload, PayloadNotFound
from sideband.payload.errors import PayloadError as FilePayloadError
from sideband.payload.header import Section
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot
from sideband.segments import PayloadSegment

log = structlog.get_logger(__name__)
T = TypeVar("T")


class FilesGone(Exception):
    """A payload file that a delivered rollout names is not there."""

    def __init__(self, file: str) -> None:
        self.file = file
        super().__init__(f"{file} is not there")


class Files:
    """The payload root of the run. ``run`` is owned by the app's task group."""

    def __init__(
        self, root: PayloadRoot, reader: PayloadReader, pool: ThreadPoolExecutor, metrics: Metrics
    ) -> None:
        self.root = root
        self._reader, self._pool, self._metrics = reader, pool, metrics
        # Unbounded on purpose: its entries are names that are known to be garbage, at most one
        # per file of the root, and refusing one would leave the file.
        self._queue: asyncio.Queue[str] = asyncio.Queue()

    def delete(self, files: Iterable[str]) -> None:
        """Delete soon. Only what retention gave up may come here."""
        for file in files:
            self._queue.put_nowait(file)

    async def run(self) -> None:
        """One worker, until cancelled; the app starts ``DELETE_WORKERS`` of them."""
        while True:
            file = await self._queue.get()
            try:
                await self._delete(file)
            finally:
                self._queue.task_done()

    async def settled(self, *, timeout_s: float) -> bool:
        """Whether everything given to ``delete`` was tried within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._queue.join()
        except TimeoutError:
            return False
        return True

    @property
    def pending(self) -> int:
        """Deletions that wait."""
        return self._queue.qsize()

    async def _delete(self, file: str) -> None:
        for attempt in range(DELETE_ATTEMPTS_MAX):
            try:
                freed_bytes = await self.call(self.root.delete, file)
            except PayloadError as exc:
                log.warning("file_delete_failed", file=file, attempt=attempt, error=str(exc))
                await asyncio.sleep(min(RETRY_WAIT_S_MAX, 0.1 * 2**attempt))
                continue
            self._reader.forget(file)
            self._metrics.files_deleted_total.labels("retention").inc()
            self._metrics.deleted_bytes_total.labels("retention").inc(freed_bytes)
            return
        self._metrics.delete_failures_total.inc()
        log.error("file_delete_given_up", file=file)

    async def call(self, act: Callable[..., T], *args: object) -> T:
        """Run blocking work on the pool."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, act, *args)

    async def size(self, file: str) -> int | None:
        """Bytes of ``file`` on disk; None when it is gone."""
        return await self.call(self.root.size, file)

    def missing(self, files: Sequence[str]) -> list[str]:
        """Those that are not on the disk. Blocks."""
        return [file for file in files if self.root.size(file) is None]

    def list_version(self, policy_version: int, is_held: Callable[[str], bool]) -> VersionPlan:
        """What a sweep would do with one orphaned version. Blocks."""
        files = [(stored.file, stored.size_bytes) for stored in self.root.files(policy_version)]
        return plan_version(policy_version, files, is_held)

    async def sweep_version(self, plan: VersionPlan) -> bool:
        """Delete what the plan says; False when that failed, which the next sweep tries again.

        A version that cannot be deleted must not keep the later ones.
        """
        try:
            if plan.is_whole:
                freed_bytes = await self.call(self.root.remove_version, plan.policy_version)
            else:
                freed_bytes = sum([await self.call(self.root.delete, f) for f in plan.files])
        except PayloadError as exc:
            self._metrics.delete_failures_total.inc()
            log.warning("version_not_swept", policy_version=plan.policy_version, error=str(exc))
            return False
        self._metrics.deleted_bytes_total.labels("sweep").inc(freed_bytes)
        self._metrics.files_deleted_total.labels("sweep").inc(len(plan.files))
        return True

    async def check(self, segments: Sequence[PayloadSegment], *, wait_s: float) -> None:
        """Compare segments with the headers of their files.

        A file that another host wrote may be invisible for a while: absence and short reads are
        tried again for ``wait_s``. Raises FilesGone, ModelMismatch, SegmentNotInFile.
        """
        by_file: defaultdict[str, list[PayloadSegment]] = defaultdict(list)
        for segment in segments:
            by_file[segment.file].append(segment)
        deadline_s = asyncio.get_running_loop().time() + wait_s
        pause_s = 0.02
        while by_file:
            try:
                await self.call(self._check_files, by_file)
            except FilePayloadError as exc:
                is_late = asyncio.get_running_loop().time() + pause_s > deadline_s
                if exc.is_retryable and not is_late:
                    await asyncio.sleep(pause_s)
                    pause_s = min(1.0, pause_s * 2)
                    continue
                if isinstance(exc, PayloadNotFound):
                    raise FilesGone(exc.file) from exc
                if isinstance(exc, OtherModelPayload):
                    raise ModelMismatch(str(exc), file=exc.file) from exc
                raise SegmentNotInFile(str(exc), file=exc.file) from exc

    def _check_files(self, by_file: dict[str, list[PayloadSegment]]) -> None:
        """Check the files one by one; those that are good leave ``by_file``."""
        for file in sorted(by_file):
            try:
                sections = self._reader.header(file).sections
            finally:
                self._reader.forget(file)  # it is read once here; descriptors are few
            for segment in by_file[file]:
                if not any(_holds(section, segment) for section in sections):
                    raise SegmentNotInFile(
                        f"{file} has no {segment.field} rows [{segment.pos}, {segment.stop}) at "
                        f"row {segment.row} of the section at byte {segment.offset}.",
                        file=file,
                    )
            del by_file[file]


def _holds(section: Section, segment: PayloadSegment) -> bool:
    """Whether the section has exactly these rows at these positions."""
    if (section.offset, section.field, section.dtype, section.shape) != (
        segment.offset,
        segment.field,
        segment.dtype,
        segment.shape,
    ):
        return False
    return any(
        pos <= segment.pos and segment.stop <= pos + rows and segment.row - row == segment.pos - pos
        for pos, row, rows in section.runs
    )
