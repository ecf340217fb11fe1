"""The terms of an orchestrator: each one opens the ledger, reads the run, leads it, and ends.

A term ends when the ledger fails or another orchestrator leads. Then everything in memory is thrown
away, requests are answered 503, and the next term begins from what the ledger has. So a failed
commit is never hidden and never built upon.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

import structlog

from services.kit.background import Crash, background
from services.kit.problems import Problem
from services.orchestrator.beginning import StartRefused
from services.orchestrator.errors import RETRY_SOON, LedgerUnavailable
from services.orchestrator.journal import refusal
from services.orchestrator.ledger import LeadershipLost, Ledger, LedgerError
from services.orchestrator.service import Orchestrator
from sideband.errors import SidebandError

log = structlog.get_logger(__name__)
RETRY_WAIT_S_MIN: Final = 0.2
RETRY_WAIT_S_MAX: Final = 5.0
STEADY_TERM_S: Final = 30.0  # what ends a term after this has nothing to do with its beginning
BETWEEN_TERMS: Final = LedgerUnavailable("The ledger is being read.", headers=RETRY_SOON)

OpenLedger = Callable[[], AbstractAsyncContextManager[Ledger]]
# Builds the service on an open ledger and runs its loops; left when the term ends.
Serve = Callable[[Ledger, bool], AbstractAsyncContextManager[Orchestrator]]


class Terms:
    """One term after the other, until the app stops or has crashed."""

    def __init__(
        self,
        open_ledger: OpenLedger,
        serve: Serve,
        *,
        standby_poll_s: float,
        crash: Crash,
    ) -> None:
        self._open_ledger, self._serve, self._crash = open_ledger, serve, crash
        self._standby_poll_s = standby_poll_s
        self._service: Orchestrator | None = None
        self._problem: Problem = BETWEEN_TERMS
        self._is_first = True
        self.count = 0  # terms that this process has led

    def service(self) -> Orchestrator:
        """The service of this term. Raises NotLeading, LedgerUnavailable between terms."""
        if self._service is None:
            raise self._problem
        return self._service

    def problem(self) -> Problem | None:
        """Why there is no service now."""
        return self._problem if self._service is None else None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Terms run inside. Raises what the first one raises before it leads.

        Another leader at the start is no error: this process then stands by.
        """
        begun = asyncio.Event()
        async with background([self._run(begun)], crash=self._crash, begun=begun):
            yield

    async def _run(self, begun: asyncio.Event) -> None:
        wait_s = RETRY_WAIT_S_MIN
        while not self._crash.has_happened:
            began_s = time.monotonic()
            try:
                await self._term(begun)
            except LeadershipLost as exc:
                self._stand_by(exc)
                begun.set()
                await asyncio.sleep(self._standby_poll_s)
                continue
            except StartRefused:
                raise  # whenever it leads: the settings will not change
            except (LedgerError, SidebandError, OSError) as exc:
                if not begun.is_set():
                    raise  # a wrong address or a ledger in use: the operator must see it
                log.error("term_ended", error=str(exc), retry_in_s=wait_s)
            if time.monotonic() - began_s > STEADY_TERM_S:
                wait_s = RETRY_WAIT_S_MIN
            await asyncio.sleep(wait_s)
            wait_s = min(RETRY_WAIT_S_MAX, wait_s * 2)

    async def _term(self, begun: asyncio.Event) -> None:
        """Lead until the ledger fails. Raises LedgerError."""
        try:
            async with self._open_ledger() as ledger:
                self._problem = BETWEEN_TERMS
                is_first, self._is_first = self._is_first, False
                async with self._serve(ledger, is_first) as service:
                    self._service = service
                    self.count += 1
                    log.info("term_begun", term=self.count)
                    begun.set()
                    await service.journal.run()
        finally:
            self._service = None

    def _stand_by(self, lost: LeadershipLost) -> None:
        self._is_first = False  # what another one led is never wiped
        self._problem = refusal(lost)
        log.info("standing_by", leader=lost.leader)
