"""Deletes payload files of work that nobody will train on, off the event loop.

A discarded attempt may still be writing when it is discarded, so each job runs twice: at once, and
after a grace period. ``discard`` never waits and may be called while a request is being cancelled.
What a job cannot delete is left to the orchestrator's orphan sweep, logged and counted.
"""

import asyncio
import heapq
import itertools
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import structlog

from services.inference_proxy.limits import PENDING_DELETES_MAX
from services.inference_proxy.metrics import Metrics
from services.inference_proxy.payloads import RootHandle
from sideband.errors import InvalidInput, PayloadError
from sideband.ids import RequestId

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Files by name, and whatever a request left under its id."""

    policy_version: int
    request_ids: tuple[RequestId, ...]
    files: tuple[str, ...]
    reason: str
    is_last: bool = False


class Janitor:
    """A queue of jobs by due time. ``run`` is the one task that works on it."""

    def __init__(
        self, root: RootHandle, *, grace_s: float, metrics: Metrics, executor: Executor
    ) -> None:
        self._root, self._grace_s, self._metrics = root, grace_s, metrics
        self._executor = executor
        self._jobs: list[tuple[float, int, Job]] = []
        self._order = itertools.count()
        self._working = 0
        self._woken = asyncio.Event()
        metrics.deletions_pending.set_function(lambda: self.pending)

    def discard(
        self,
        *,
        policy_version: int,
        request_ids: Iterable[RequestId] = (),
        files: Iterable[str] = (),
        reason: str,
    ) -> None:
        """Delete soon, and look once more after the grace period."""
        if not self._root.is_set:
            return
        job = Job(
            policy_version=policy_version,
            request_ids=tuple(request_ids),
            files=tuple(files),
            reason=reason,
        )
        if job.request_ids or job.files:
            self._put(0.0, job)

    @property
    def pending(self) -> int:
        """Jobs that wait or are worked on, second passes included."""
        return len(self._jobs) + self._working

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            self._woken.clear()
            now_s = asyncio.get_running_loop().time()
            while self._jobs and self._jobs[0][0] <= now_s:
                await self._work(heapq.heappop(self._jobs)[2])
            wait_s = self._jobs[0][0] - now_s if self._jobs else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def finish(self) -> None:
        """Do what waits, at once: for the shutdown."""
        while self._jobs:
            await self._work(replace(heapq.heappop(self._jobs)[2], is_last=True))

    def _put(self, due_s: float, job: Job) -> None:
        heapq.heappush(self._jobs, (due_s, next(self._order), job))
        self._woken.set()

    async def _work(self, job: Job) -> None:
        loop = asyncio.get_running_loop()
        self._working += 1
        try:
            count, size_bytes = await loop.run_in_executor(self._executor, self._delete, job)
        finally:
            self._working -= 1
            # Also when a shutdown cancels the wait: `finish` then finds the second pass.
            if not job.is_last and len(self._jobs) < PENDING_DELETES_MAX:
                self._put(loop.time() + self._grace_s, replace(job, is_last=True))
        if count:
            self._metrics.files_deleted_total.labels(job.reason).inc(count)
            self._metrics.deleted_bytes_total.labels(job.reason).inc(size_bytes)
            log.info("files_deleted", reason=job.reason, files=count, size_bytes=size_bytes)

    def _delete(self, job: Job) -> tuple[int, int]:
        """Files and bytes deleted. Blocks."""
        count = size_bytes = 0
        root = self._root.current
        if root is None:  # no root was ever there, so no engine could write either
            return 0, 0
        files = dict.fromkeys(job.files)
        try:
            for request_id in job.request_ids:
                files |= dict.fromkeys(root.files_of_request(job.policy_version, request_id))
        except PayloadError as exc:
            self._failed(job, exc)
        for file in files:
            try:
                freed = root.delete(file)
            except (PayloadError, InvalidInput) as exc:
                self._failed(job, exc)
                continue
            count += freed > 0
            size_bytes += freed
        return count, size_bytes

    def _failed(self, job: Job, error: Exception) -> None:
        self._metrics.delete_failures_total.inc()
        log.warning("delete_failed", reason=job.reason, error=str(error))
