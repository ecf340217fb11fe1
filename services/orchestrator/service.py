"""What the orchestrator does: decides on the book, commits, and only then acts.

Every public method is one decision or one read. Effects (deletions, discarded sessions, metrics)
follow the commit; loops in ``loops.py`` build, ship and poll. All methods run on one event loop;
between two awaits nobody else changes the book.

Whatever changes something raises LedgerUnavailable when its change is not known to be durable, and
LedgerBehind, before it decides, when too much waits.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from services.kit.problems import Problem
from services.kit.readers.pool import ReaderPool
from services.orchestrator import collecting, ending, leasing, policies, stepping
from services.orchestrator.checking import DeliveryLog
from services.orchestrator.config import OrchestratorSettings
from services.orchestrator.errors import (
    RolloutUnknown,
)
from services.orchestrator.feed_client import Failure, FeedClient
from services.orchestrator.files import Files
from services.orchestrator.history import PolicySource
from services.orchestrator.intake import IntakeRules
from services.orchestrator.journal import Journal
from services.orchestrator.leasing import LeaseRequest
from services.orchestrator.ledger import Ledger
from services.orchestrator.lifecycle import Phase, Run
from services.orchestrator.metrics import Metrics
from services.orchestrator.proxy_client import ProxyClient
from services.orchestrator.records import Change, Lease, LeaseState, Rollout
from services.orchestrator.releases import Releases
from services.orchestrator.resuming import Resumption
from services.orchestrator.room import Room
from sideband.batch.packing import PackingPlan
from sideband.ids import LeaseId, RolloutId, SessionId
from sideband.model import ModelShape

log = structlog.get_logger(__name__)


class Orchestrator:
    """One run."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        *,
        resumption: Resumption,
        model: ModelShape | None,
        ledger: Ledger,
        files: Files | None,
        metrics: Metrics,
        readers: ReaderPool,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self.settings, self.model, self.files, self.metrics = settings, model, files, metrics
        self.book, self.ledger, self.readers = resumption.book, ledger, readers
        self.resumption = resumption
        self.plan: PackingPlan = settings.packing_plan()
        self.sessions: asyncio.Queue[SessionId] = asyncio.Queue()  # to be discarded
        self.releases = Releases()
        self.proxy: ProxyClient | None = None  # where turns are fetched; the app sets it
        self.feed: FeedClient | None = None  # the app sets it, too
        self.has_crashed = False  # a background task is gone
        self.to_build = asyncio.Event()  # something may be ready to be built
        self.to_ship = asyncio.Event()  # something may be ready to be shipped
        self.to_sweep = asyncio.Event()  # the run has ended
        self.feed_failure: Failure | None = None  # as the feed says
        self.feed_lineage = 0  # that the feed is known to know
        self.feed_telling = asyncio.Lock()  # of the next, by whoever comes first
        self.ended_feed: str | None = None  # its process that was told that no more will come
        self.feed_turn = asyncio.Lock()  # held by who hands steps over
        self.pushes = 0  # of the policy version, so that an older answer to a poll is known
        self.clock_s = clock_s
        self.journal = Journal(
            ledger,
            self._let_out,
            commit_timeout_s=settings.ledger_commit_timeout_s,
            on_commit=metrics.committed,
        )
        self.room = Room(settings.quota(), metrics)
        if files is not None:
            files.on_deleted = self._note_deleted
        self.deliveries = DeliveryLog()
        self.intake_rules = IntakeRules(
            run_id=self.book.rules.run_id,
            model=model,
            has_root=files is not None,
            seq_len=settings.seq_len,
            keep_rows_around_holes=settings.keep_rows_around_holes,
            strict_masks=settings.strict_masks,
        )

    def let_out_resumption(self) -> None:
        """What follows from the changes with which the term began. Once."""
        for change in self.resumption.changes:
            self._let_out(change)
        if self.files is not None:
            self.files.deleter.add(self.resumption.delete_files)

    @contextmanager
    def decision(self) -> Iterator[Change]:
        """The change of one decision, which must hold no await.

        A refusal (Problem) has changed nothing. Any other error may have left the book half
        changed: then the book is given up, and read from the ledger again.
        """
        change, is_whole = Change(), False
        try:
            yield change
            is_whole = True
        except Problem:
            is_whole = True
            raise
        finally:
            if not is_whole and self.ledger.is_durable:
                self.journal.give_up("a decision failed half way; the log has it")

    async def commit(self, change: Change) -> None:
        """Make a change, and all before it, durable; its effects are out when this returns."""
        self.book.seal(change)
        await self.journal.commit(change)

    def _let_out(self, change: Change) -> None:
        """What follows from a durable change, in order."""
        self.metrics.observe(change)
        if self.files is not None:
            self.files.deleter.add(change.delete_files)
        for session_id in change.discard_sessions:
            self.sessions.put_nowait(session_id)
        if change.phase is not None:
            emit = log.error if change.phase == Phase.STOPPED.value else log.info
            emit("phase_entered", phase=change.phase, reason=self.book.run.reason)
            if change.phase == Phase.ENDED.value:
                self.to_sweep.set()
        has_ended = any(lease.state is not LeaseState.OPEN for lease in change.leases)
        has_news = change.rollouts or change.steps or change.returns
        if has_ended or has_news or change.phase is not None:
            self.to_build.set()  # a new lease alone makes nothing ready
            self.to_ship.set()

    def _note_deleted(self, files: list[str]) -> None:
        self.journal.put(Change(files_deleted=files))  # nothing waits for it

    async def settled(self) -> None:
        """All that was decided until now is durable. Raises LedgerUnavailable."""
        await self.journal.commit(Change())

    async def take_lease(self, asked: LeaseRequest) -> Lease:
        """A lease for one rollout. Raises StorageFull and what ``leasing.take`` raises."""
        self.journal.admit()
        self.room.admit_lease(self.book)
        with self.decision() as change:
            lease_id = LeaseId(secrets.token_hex(12))
            lease = leasing.take(self.book, change, asked, lease_id, self.clock_s())
        await self.commit(change)
        if change.leases:
            self.metrics.leases_total.labels(lease.state.value).inc()
        return lease

    async def renew_lease(self, lease_id: LeaseId, files: list[str]) -> Lease:
        """A later deadline; ``files`` are held for the lease."""
        with self.decision() as change:
            lease = leasing.renew(self.book, change, lease_id, files, self.clock_s())
        await self.commit(change)
        return lease

    async def abort_lease(self, lease_id: LeaseId) -> Lease:
        """The client gives the rollout up."""
        with self.decision() as change:
            lease = leasing.abort(self.book, change, lease_id, self.clock_s())
        await self.commit(change)
        return lease

    async def drop_rollout(self, rollout_id: RolloutId) -> Rollout:
        """An operator drops a held rollout. Raises RolloutUnknown, RolloutInStep."""
        with self.decision() as change:
            rollout = collecting.remove(self.book, change, rollout_id)
        await self.commit(change)
        return rollout

    def rollout(self, rollout_id: RolloutId) -> Rollout:
        """Raises RolloutUnknown."""
        rollout = self.book.rollouts.get(rollout_id)
        if rollout is None:
            raise RolloutUnknown(f"No rollout {rollout_id}.", rollout_id=rollout_id)
        return rollout

    async def set_policy_version(
        self, version: int, source: PolicySource, *, lineage: int | None = None
    ) -> None:
        """What every serving engine has applied at least. Raises LineageConflict."""
        now_s = self.clock_s()
        with self.decision() as change:
            policies.report(self.book, change, version, source=source, now_s=now_s, lineage=lineage)
        await self.commit(change)

    async def acknowledge(self, committed_step: int) -> None:
        """Every global rank has committed every step up to this one."""
        with self.decision() as change:
            stepping.acknowledge(self.book, change, committed_step, self.clock_s())
        await self.commit(change)

    async def tick(self) -> None:
        """Whatever time alone decides."""
        with self.decision() as change:
            ending.tick(self.book, change, self.clock_s())
        await self.commit(change)

    async def pause(self) -> Run:
        """No new leases."""
        return await self._enter(self.book.run.paused())

    async def resume(self) -> Run:
        """Leases again. Raises RunStopped or RunEnded after a terminal phase."""
        if self.book.run.is_terminal:
            problem = self.book.run.lease_problem()
            assert problem is not None, "a terminal run gives no lease"
            raise problem
        return await self._enter(self.book.run.resumed())

    async def drain(self, *, leases_s: float | None, deadline_s: float | None) -> Run:
        """Take no new rollouts and end; both times are from now."""
        now_s = self.clock_s()
        leases_s = self.settings.drain_leases_s if leases_s is None else leases_s
        deadline_s = self.settings.drain_deadline_s if deadline_s is None else deadline_s
        run = self.book.run.draining(
            leases_until_s=now_s + leases_s, drain_until_s=now_s + deadline_s
        )
        await self._enter(run)
        await self.tick()
        return self.book.run

    async def reopen(self) -> Run:
        """What stopped the run is gone, as ``reopening`` has seen."""
        return await self._enter(self.book.run.reopened())

    async def stop(self, reason: str) -> None:
        """A fault ends the run; what was collected stays where it is."""
        await self._enter(self.book.run.stopped(reason))

    async def _enter(self, run: Run) -> Run:
        with self.decision() as change:
            ending.set_run(self.book, change, run, self.clock_s())
        await self.commit(change)
        return self.book.run
