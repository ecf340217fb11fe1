"""A few reader processes, and the order in which large bodies come to them.

Readers are started when they are first needed and kept. A reader that dies, or answers too late, is
ended, and only its own request fails.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import structlog

from services.kit.problems import Problem
from services.kit.readers.process import Reader, ReaderGone

RETRY_SOON: Final = {"Retry-After": "1"}
CLOSE_TIMEOUT_S: Final = 5.0
log = structlog.get_logger(__name__)


class ReadersBusy(Problem):
    """Too many large bodies at the same time."""

    status, code, title = 503, "readers_busy", "Too many large bodies"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, headers=RETRY_SOON)


class ReaderLost(Problem):
    """The process that read a large body died, or took too long. Nothing has changed."""

    status, code, title = 503, "reader_lost", "Large body not read"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, headers=RETRY_SOON)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLimits:
    """``bytes_max`` bounds the bodies that wait or are read, all of them together."""

    bytes_max: int
    processes: int = 2  # so that one body of a gigabyte does not keep all others waiting
    wait_s: float = 60.0  # for a reader
    answer_s: float = 120.0  # for one answer; the worst body of 256 MB takes 20 s

    def __post_init__(self) -> None:
        assert self.processes >= 1, "somebody has to read"


class ReaderPool:
    """Owns the readers of ``module`` (see ``child``) while its block runs."""

    def __init__(self, module: str, limits: ReaderLimits) -> None:
        self._module, self.limits = module, limits
        self._turn = asyncio.Semaphore(limits.processes)
        self._idle: list[Reader] = []
        self._started: set[Reader] = set()
        self._held_bytes = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        started, self._idle = list(self._started), []
        for reader in started:
            reader.kill()
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await asyncio.gather(*(reader.ended() for reader in started))

    def hold(self, size_bytes: int) -> None:
        """Count bytes of a large body, before they are kept. Raises ReadersBusy."""
        bytes_max = self.limits.bytes_max
        if self._held_bytes + size_bytes > bytes_max:
            raise ReadersBusy(
                f"{self._held_bytes} bytes of large bodies are held; at most {bytes_max} may be."
            )
        self._held_bytes += size_bytes

    def let_go(self, size_bytes: int) -> None:
        """Of what was held."""
        self._held_bytes -= size_bytes

    @asynccontextmanager
    async def job(self) -> AsyncIterator["ReaderJob"]:
        """One conversation with a reader. Raises ReadersBusy, ReaderLost."""
        try:
            async with asyncio.timeout(self.limits.wait_s):
                await self._turn.acquire()
        except TimeoutError as exc:
            raise ReadersBusy(f"No reader came free within {self.limits.wait_s:g} s.") from exc
        job = ReaderJob(self)
        try:
            yield job
        finally:
            job.done()

    async def take(self) -> Reader:
        """An idle reader, or a new one. Raises ReaderGone."""
        self._started = {reader for reader in self._started if reader.is_running}
        while self._idle:
            reader = self._idle.pop()
            if reader.is_running:
                return reader
        reader = await Reader.start(self._module)
        self._started.add(reader)
        is_ready = False
        try:
            await reader.ready()
            is_ready = True
        finally:
            if not is_ready:
                reader.kill()
        return reader

    def give(self, reader: Reader | None, *, is_whole: bool) -> None:
        """A conversation has ended; without ``is_whole`` nobody knows what the reader does."""
        if reader is not None and is_whole:
            reader.end_conversation()
            self._idle.append(reader)
        elif reader is not None:
            reader.kill()
        self._turn.release()


class ReaderJob:
    """A turn with a reader. ``done`` ends it early, for whoever goes on with the answer."""

    def __init__(self, pool: ReaderPool) -> None:
        self._pool = pool
        self._reader: Reader | None = None
        self._is_whole, self._is_done = True, False

    async def ask(self, head: bytes, body: deque[bytes] | None = None) -> tuple[bytes, memoryview]:
        """The head and the body of the answer; ``body`` is empty after it. Raises ReaderLost."""
        assert not self._is_done, "a conversation has an end"
        self._is_whole = False
        limit_s = self._pool.limits.answer_s
        try:
            async with asyncio.timeout(limit_s):
                if self._reader is None:
                    self._reader = await self._pool.take()
                answer = await self._reader.ask(head, body if body is not None else deque())
        except TimeoutError as exc:
            log.error("reader_late", waited_s=limit_s)
            raise ReaderLost(f"Reading took longer than {limit_s:g} s, and was ended.") from exc
        except ReaderGone as exc:
            log.error("reader_died", reason=str(exc))
            raise ReaderLost("The process that read the body died; it may lack memory.") from exc
        self._is_whole = True
        return answer

    def done(self) -> None:
        """Let others have the reader. Idempotent."""
        if not self._is_done:
            self._is_done = True
            self._pool.give(self._reader, is_whole=self._is_whole)
