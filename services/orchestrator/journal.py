"""Makes changes durable in the order in which they were decided, many in one commit.

While one commit is on its way to the disk the changes that come gather for the next one, so the
cost of a sync is shared by all that wait. What follows from a change is let out here, in the same
order, whoever waited for it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from services.kit.problems import Problem
from services.orchestrator.errors import RETRY_SOON, LedgerBehind, LedgerUnavailable, NotLeading
from services.orchestrator.ledger import LeadershipLost, Ledger, LedgerError, LedgerFailed
from services.orchestrator.limits import CHANGES_PER_COMMIT_MAX, CHANGES_WAITING_MAX
from services.orchestrator.records import Change

Entry = tuple[Change, "asyncio.Future[None]"]
UNAVAILABLE: Final = "The ledger cannot be written; the run goes on from what it has."


class Journal:
    """One writer of one ledger. ``run`` is the task that a term is.

    ``on_durable`` hears of each change, ``on_commit`` of the number of changes of each commit and
    of the seconds that it took.
    """

    def __init__(
        self,
        ledger: Ledger,
        on_durable: Callable[[Change], None],
        *,
        commit_timeout_s: float,
        on_commit: Callable[[int, float], None],
    ) -> None:
        self._ledger, self._on_durable, self._on_commit = ledger, on_durable, on_commit
        self._commit_timeout_s = commit_timeout_s
        self._waiting: deque[Entry] = deque()
        self._writing: list[Entry] = []
        self._wake = asyncio.Event()
        self._error: LedgerError | None = None  # set: nothing is written any more

    @property
    def pending(self) -> int:
        """Changes that are not durable yet."""
        return len(self._waiting) + len(self._writing)

    def admit(self) -> None:
        """Room for one more change, before it is decided. Raises LedgerBehind."""
        self._check()
        if len(self._waiting) >= CHANGES_WAITING_MAX:
            raise LedgerBehind(
                f"{CHANGES_WAITING_MAX} changes wait for the ledger.", headers=RETRY_SOON
            )

    def put(self, change: Change) -> "asyncio.Future[None]":
        """Take a change in; durable when the future is done.

        Raises LedgerUnavailable, NotLeading.
        """
        self._check()
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieved)
        self._waiting.append((change, future))
        self._wake.set()
        return future

    async def commit(self, change: Change) -> None:
        """Make ``change`` and all before it durable. Raises LedgerUnavailable, NotLeading.

        An empty change waits for those before it: a repeated request must not be answered
        earlier than the first one. Whoever is cancelled while waiting changes nothing.
        """
        if change:
            future = self.put(change)
        elif self._waiting or self._writing:
            future = (self._waiting or self._writing)[-1][1]
        else:
            self._check()
            return
        await self._durable(future)

    async def _durable(self, future: "asyncio.Future[None]") -> None:
        try:
            await asyncio.shield(future)
        except LedgerError as exc:
            raise refusal(exc) from exc

    def _check(self) -> None:
        if self._error is not None:
            raise refusal(self._error)

    @property
    def is_open(self) -> bool:
        """Whether changes are still written."""
        return self._error is None

    async def renew(self) -> None:
        """Make sure that this process still leads. Raises LedgerUnavailable, NotLeading."""
        await self._durable(self.put(Change()))

    def give_up(self, reason: str) -> None:
        """Write nothing more: what is in memory cannot be trusted. ``run`` ends."""
        self._error = LedgerFailed(reason)
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled. Raises LedgerError; all that waited get it too."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting and self._error is None:
                    await self._write_some()
                if self._error is not None:
                    raise self._error
        except LedgerError as exc:
            self._error = exc
            raise
        finally:
            self._error = self._error or LedgerFailed("the service stops")
            for _, future in (*self._writing, *self._waiting):
                if not future.done():
                    future.set_exception(self._error)
            self._writing, self._waiting = [], deque()

    async def _write_some(self) -> None:
        count = min(len(self._waiting), CHANGES_PER_COMMIT_MAX)
        self._writing = [self._waiting.popleft() for _ in range(count)]
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._commit_timeout_s):
                await self._ledger.commit([change for change, _ in self._writing])
        except TimeoutError as exc:
            raise LedgerFailed(f"no commit within {self._commit_timeout_s} s") from exc
        self._on_commit(count, time.monotonic() - began_s)
        written, self._writing = self._writing, []
        for change, future in written:
            self._on_durable(change)
            if not future.done():
                future.set_result(None)


def refusal(error: LedgerError) -> Problem:
    """What a client is told; the words of the database stay in the log."""
    if isinstance(error, LeadershipLost):
        return NotLeading(str(error), headers=RETRY_SOON, leader=error.leader)
    return LedgerUnavailable(UNAVAILABLE, headers=RETRY_SOON)


def _retrieved(future: "asyncio.Future[None]") -> None:
    """Nobody need wait for a change: its failure ends the term in any case."""
    if not future.cancelled():
        future.exception()
