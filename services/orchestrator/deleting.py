"""Deletes the files that retention gave up: at a bounded rate, and until it has worked.

A file that is gone already is deleted. Any other error (no permission, busy, a stale handle, a
filesystem that is away) is tried again with a growing pause, for as long as it takes. What is not
done when the process ends is in the ledger, and begun again by the next one. Deleting twice is
harmless: no name is ever written a second time.
"""

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from sideband.errors import PayloadError

log = structlog.get_logger(__name__)
BATCH_FILES_MAX: Final = 64  # one visit of a thread
BATCHES_MAX: Final = 4  # unlink on a shared filesystem is a round trip; more would crowd it
RETRY_WAIT_S_MIN: Final = 0.1
RETRY_WAIT_S_MAX: Final = 60.0

Outcome = tuple[str, int | PayloadError]  # the file, and the bytes freed or why not


class Deleter:
    """Owns the files that wait to be deleted. ``run`` is a task of the app's.

    ``act`` deletes some files in a thread and tells the outcome of each. ``on_deleted`` hears of
    what is gone, and of the bytes freed; ``on_failure`` of every failed attempt.
    """

    def __init__(
        self,
        act: Callable[[list[str]], "asyncio.Future[list[Outcome]]"],
        *,
        files_per_s: float,
        on_deleted: Callable[[list[str], int], None],
        on_failure: Callable[[int], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._act, self._files_per_s, self._clock_s = act, files_per_s, clock_s
        self._on_deleted, self._on_failure = on_deleted, on_failure
        # Unbounded on purpose: its entries are names that are known to be garbage, at most one
        # per file of the root, and refusing one would leave the file.
        self._ready: deque[tuple[str, int]] = deque()  # with the number of failed attempts
        self._later: list[tuple[float, int, str, int]] = []
        self._serial = itertools.count()
        self._busy_count = 0
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()

    def add(self, files: Iterable[str]) -> None:
        """Delete soon. Only what retention gave up may come here."""
        self._ready.extend((file, 0) for file in files)
        if self._ready:
            self._idle.clear()
            self._wake.set()

    @property
    def pending(self) -> int:
        """Files that are not deleted yet."""
        return len(self._ready) + len(self._later) + self._busy_count

    async def settled(self, *, timeout_s: float) -> bool:
        """Whether every file was tried at least once within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Delete until cancelled."""
        while True:
            self._take_due()
            if not self._ready:
                self._idle.set()
                await self._wait()
                continue
            began_s = self._clock_s()
            count = await self._delete_some()
            pause_s = count / self._files_per_s - (self._clock_s() - began_s)
            await asyncio.sleep(max(0.0, pause_s))

    async def _wait(self) -> None:
        wait_s = None if not self._later else max(0.0, self._later[0][0] - self._clock_s())
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return  # one that failed is due
        self._wake.clear()

    def _take_due(self) -> None:
        now_s = self._clock_s()
        while self._later and self._later[0][0] <= now_s:
            _, _, file, attempts = heapq.heappop(self._later)
            self._ready.append((file, attempts))

    async def _delete_some(self) -> int:
        """As much as the rate admits for a tenth of a second; the number of files."""
        room = max(1, min(BATCH_FILES_MAX * BATCHES_MAX, int(self._files_per_s / 10)))
        taken = [self._ready.popleft() for _ in range(min(room, len(self._ready)))]
        attempts = dict(taken)
        self._busy_count = len(taken)
        pieces = [
            [file for file, _ in taken[first : first + BATCH_FILES_MAX]]
            for first in range(0, len(taken), BATCH_FILES_MAX)
        ]
        outcomes = await asyncio.gather(*(self._act(piece) for piece in pieces))
        self._busy_count = 0
        self._note([one for piece in outcomes for one in piece], attempts)
        return len(taken)

    def _note(self, outcomes: list[Outcome], attempts: dict[str, int]) -> None:
        deleted = [file for file, outcome in outcomes if isinstance(outcome, int)]
        if deleted:
            freed = sum(outcome for _, outcome in outcomes if isinstance(outcome, int))
            self._on_deleted(deleted, freed)
        failed = [(file, error) for file, error in outcomes if isinstance(error, PayloadError)]
        if failed:
            self._on_failure(len(failed))
            file, error = failed[0]
            log.warning("files_not_deleted", files=len(failed), first=file, error=str(error))
        for file, _ in failed:
            count = attempts[file] + 1
            wait_s = min(RETRY_WAIT_S_MAX, RETRY_WAIT_S_MIN * 2 ** min(count, 30))
            entry = (self._clock_s() + wait_s, next(self._serial), file, count)
            heapq.heappush(self._later, entry)
