"""A worker among others: the leader tells all what holds, and asks all for what they have.

Publishing ends with all workers alike: one that does not follow in time is ended, and the next one
in its place begins with what the parent was told first. So a worker never serves with an older
state than the one an admin route has answered.
"""

import asyncio
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from services.inference_proxy.admission import Gate
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.schemas import EngineView, Sessions, SessionView
from services.inference_proxy.turn_source import OwnTurns
from services.inference_proxy.workers.asks import (
    Adopt,
    AnyAsk,
    Done,
    Drain,
    Drained,
    End,
    Keep,
    Look,
    Scrape,
    Seen,
    Text,
)
from services.inference_proxy.workers.calls import Calls
from services.inference_proxy.workers.errors import PARENT, WorkerSilent
from services.inference_proxy.workers.merging import (
    merged_engines,
    merged_metrics,
    merged_sessions,
)
from services.inference_proxy.workers.places import LEADER
from services.inference_proxy.workers.state import SharedState, restore, state_of
from services.inference_proxy.workers.turns import TeamTurns

CHECK_INTERVAL_S: Final = 0.5  # an ejection can raise the applied version without a report
READY_TIMEOUT_S: Final = 2.0
ADOPT_TIMEOUT_S: Final = 5.0  # beyond it a worker is ended: it must not serve what is over

R = TypeVar("R")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker's place. ``state`` is what the parent had last been told when it began."""

    index: int
    workers: int
    calls: Calls
    state: SharedState | None

    @property
    def is_leader(self) -> bool:
        """Whether admin routes are answered here."""
        return self.index == LEADER

    def turns(self, own: OwnTurns) -> TeamTurns:
        """Kept turns of all workers, ``own`` among them."""
        return TeamTurns(own, self.calls, index=self.index, workers=self.workers)


class Team:
    """The other workers, as ``Siblings`` says."""

    def __init__(
        self, member: Member, book: EngineBook, gate: Gate, settled: asyncio.Event
    ) -> None:
        self._member, self._calls = member, member.calls
        self._book, self._gate = book, gate
        self._others = [each for each in range(member.workers) if each != member.index]
        self._told: SharedState | None = None
        self._number, self._is_settled = 0, settled.is_set()
        self._is_kept = member.state is not None  # the parent knows what holds
        self._telling = asyncio.Lock()
        if member.state is None:  # all begin alike
            self._told = self._state(number=0)
        else:  # a leader in a dead one's place says again what that one may not have said to all
            self._number = member.state.number
            self._is_settled = member.state.is_settled
            restore(member.state, book, gate)
            if member.state.is_settled and not member.is_leader:
                settled.set()
        self._applied = book.applied

    async def publish(self) -> None:
        """What was changed here holds in every worker once this returns."""
        async with self._telling:
            state = self._state(number=self._number + 1)
            if state.says_the_same(self._told):
                await self._keep_first()
                return
            self._number = state.number
            await self._calls.ask(PARENT, Keep(state), Done)
            self._is_kept = True
            await asyncio.gather(*(self._tell(each, state) for each in self._others))
            self._told, self._applied = state, state.applied

    async def _keep_first(self) -> None:
        """Tell the parent what all began with, once every engine was asked: a worker in a dead
        one's place then knows the engines, also when nothing has changed since.
        """
        is_known = not any(engine.health.is_unknown for engine in self._book)
        if not self._is_kept and is_known and self._told is not None:
            await self._calls.ask(PARENT, Keep(self._told), Done)
            self._is_kept = True

    async def begin(self) -> None:
        """The version on record is known here: until it holds in every worker."""
        self._is_settled = True
        while not await self._published():  # noqa: ASYNC110 - tried until it works
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _published(self) -> bool:
        try:
            await self.publish()
        except WorkerSilent as exc:
            log.error("state_not_published", reason=str(exc))
            return False
        return True

    def applied(self, own: int) -> int:
        """What is applied in every worker, where ``own`` is in this one: nobody is told earlier."""
        return self._applied

    def _state(self, *, number: int) -> SharedState:
        return state_of(self._book, self._gate, is_settled=self._is_settled, number=number)

    async def _tell(self, worker: int, state: SharedState) -> None:
        try:
            await self._calls.ask(worker, Adopt(state), Done, timeout_s=ADOPT_TIMEOUT_S)
        except WorkerSilent as exc:
            log.error("worker_does_not_follow", worker=worker, reason=str(exc))
            await self._calls.ask(PARENT, End(worker), Done)

    async def drain(self, *, timeout_s: float) -> bool:
        """The others take nothing new; whether nothing runs there any more."""
        wait_s = timeout_s + READY_TIMEOUT_S
        replies = await asyncio.gather(
            *(
                self._calls.ask(each, Drain(timeout_s), Drained, timeout_s=wait_s)
                for each in self._others
            )
        )
        return all(reply.is_complete for reply in replies)

    async def in_flight(self) -> int:
        """Requests that run there."""
        return sum(seen.in_flight for seen in await self._look())

    async def engines(self, own: list[EngineView]) -> list[EngineView]:
        """Engines as all workers together see them."""
        seen = await self._look()
        theirs = [[EngineView.model_validate(view) for view in each.engines] for each in seen]
        return merged_engines([own, *theirs])

    async def sessions(self, own: Sessions, *, limit: int) -> Sessions:
        """Sessions of all, at most ``limit``, the latest of each worker last."""
        seen = await self._look(sessions=limit)
        theirs = [[SessionView.model_validate(view) for view in each.sessions] for each in seen]
        count = own.count + sum(each.session_count for each in seen)
        return Sessions(sessions=merged_sessions([own.sessions, *theirs], limit), count=count)

    async def not_ready(self) -> list[str]:
        """Why the others cannot serve, or one in a dead one's place could not. Raises nothing:
        silence is a reason.
        """
        reasons = [] if self._is_kept else ["the workers' parent does not know the engines yet"]
        for worker, seen in await self._answers(Look(), Seen):
            found = [str(seen)] if isinstance(seen, WorkerSilent) else seen.not_ready
            reasons += [f"worker {worker}: {reason}" for reason in found]
        return reasons

    async def scraped(self, own: bytes) -> bytes:
        """Metrics of all; those of a silent worker are missing."""
        texts = [(self._member.index, own)]
        for worker, reply in await self._answers(Scrape(), Text):
            if isinstance(reply, Text):
                texts.append((worker, reply.content))
        return await asyncio.to_thread(merged_metrics, texts)

    async def run(self) -> None:
        """Tell the others of what changes by itself, and hear what they found, until cancelled."""
        while self._member.is_leader:
            await self._published()
            for _, seen in await self._answers(Look(), Seen):
                if isinstance(seen, Seen):
                    self._hear(seen)
            await asyncio.sleep(CHECK_INTERVAL_S)

    def _hear(self, seen: Seen) -> None:
        """What another worker has found of engines. One that it found behind is asked again here:
        only the engine knows whether it was brought up to date since.
        """
        for engine in self._book:
            engine.names_weights |= engine.name in seen.naming
            engine.doubts += engine.name in seen.older and not engine.is_doubted

    async def _look(self, *, sessions: int = 0) -> list[Seen]:
        look = Look(sessions=sessions)
        return await asyncio.gather(*(self._calls.ask(each, look, Seen) for each in self._others))

    async def _answers(self, ask: AnyAsk, kind: type[R]) -> list[tuple[int, R | WorkerSilent]]:
        async def one(worker: int) -> tuple[int, R | WorkerSilent]:
            try:
                reply = await self._calls.ask(worker, ask, kind, timeout_s=READY_TIMEOUT_S)
            except WorkerSilent as exc:
                return worker, exc
            return worker, reply

        return await asyncio.gather(*(one(each) for each in self._others))
