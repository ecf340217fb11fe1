"""Acts on the payload root: deletes what retention gave up, sweeps, checks segments.

``Files`` owns a bounded pool of threads: the event loop never waits for the filesystem.
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import structlog

from services.orchestrator.deleting import Deleter, Outcome
from services.orchestrator.errors import ModelMismatch, SegmentNotInFile
from services.orchestrator.metrics import Metrics
from services.orchestrator.quota import Usage
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
    """The payload root of the run. ``deleter.run`` is owned by the app's task group.

    ``on_deleted`` hears which of the files that were to be deleted are gone.
    """

    def __init__(
        self,
        root: PayloadRoot,
        reader: PayloadReader,
        pool: ThreadPoolExecutor,
        metrics: Metrics,
        *,
        deletes_per_s: float,
    ) -> None:
        self.root = root
        self._reader, self._pool, self._metrics = reader, pool, metrics
        self.on_deleted: Callable[[list[str]], None] = lambda files: None
        self.deleter = Deleter(
            lambda files: self._submit(self._delete_some, files),
            files_per_s=deletes_per_s,
            on_deleted=self._note_deleted,
            on_failure=metrics.delete_failures_total.inc,
        )
        metrics.deletions_pending.set_function(lambda: self.deleter.pending)

    def _delete_some(self, files: list[str]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for file in files:
            self._reader.forget(file)
            try:
                outcomes.append((file, self.root.delete(file)))
            except PayloadError as exc:
                outcomes.append((file, exc))
        return outcomes

    def _note_deleted(self, files: list[str], freed_bytes: int) -> None:
        self._metrics.files_deleted_total.labels("retention").inc(len(files))
        self._metrics.deleted_bytes_total.labels("retention").inc(freed_bytes)
        self.on_deleted(files)

    def usage(self, *, with_used: bool) -> Usage:
        """How full the root is. ``with_used`` looks at every file of the run. Blocks."""
        status = os.statvfs(self.root.path)
        used_bytes = None
        if with_used:
            used_bytes = sum(
                stored.size_bytes
                for version in self.root.versions()
                for stored in self.root.files(version)
            )
        return Usage(free_bytes=status.f_bavail * status.f_frsize, used_bytes=used_bytes)

    def _submit(self, act: Callable[..., T], *args: object) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._pool, act, *args)

    async def call(self, act: Callable[..., T], *args: object) -> T:
        """Run blocking work on the pool."""
        return await self._submit(act, *args)

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

    async def planned(
        self, policy_version: int, is_held: Callable[[str], bool]
    ) -> VersionPlan | None:
        """What a sweep would do with one orphaned version; None when it cannot be listed now."""
        try:
            return await self.call(self.list_version, policy_version, is_held)
        except PayloadError as exc:
            self._note_unswept(policy_version, exc)
            return None

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
            self._note_unswept(plan.policy_version, exc)
            return False
        self._metrics.deleted_bytes_total.labels("sweep").inc(freed_bytes)
        self._metrics.files_deleted_total.labels("sweep").inc(len(plan.files))
        return True

    def _note_unswept(self, policy_version: int, error: PayloadError) -> None:
        self._metrics.delete_failures_total.inc()
        log.warning("version_not_swept", policy_version=policy_version, error=str(error))

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
