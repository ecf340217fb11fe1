"""An orchestrator in one process whose death is simulated between any two steps of its event loop.

``simulated_world`` outlives it. Everything is seeded; nothing here waits for a clock or a thread.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from services.kit.problems import Problem
from services.kit.turns import TurnWire
from services.orchestrator import going_back, loops, returning, shipping
from services.orchestrator.config import OrchestratorSettings
from services.orchestrator.delivering import deliver
from services.orchestrator.errors import RunEnded
from services.orchestrator.leasing import LeaseRequest
from services.orchestrator.ledger import LedgerFailed
from services.orchestrator.lifecycle import Phase
from services.orchestrator.metrics import Metrics
from services.orchestrator.reading import reader_pool
from services.orchestrator.records import Records
from services.orchestrator.restoring import restore
from services.orchestrator.service import Orchestrator
from services.orchestrator.starting import begin_term
from services.orchestrator.wire import RolloutWire
from sideband.ids import GroupId, LeaseId, RequestId, RolloutId
from sideband.payload.paths import fan_out
from sideband.segments import PayloadSegment
from tests.faults.simulated_world import SimulatedFeed, SimulatedFiles, World
from tests.services.orchestrator.support import MODEL

GROUP_SIZE = 2
STEP_ROLLOUTS = 3
RETURNS_MAX = 3
STARTS_MAX = 2


def settings(*, keeps: bool, start: tuple[int, str] | None = None) -> OrchestratorSettings:
    """Fast loops, small steps; done steps are kept for a trainer that goes back, or not."""
    step, start_id = start or (None, None)
    return OrchestratorSettings(
        run_id="run-1",
        seq_len=64,
        step_rollouts=STEP_ROLLOUTS,
        max_off_policy_steps=1000,
        feed_poll_s=0.0001,
        tick_s=0.0001,
        initial_policy_version=0,
        steps_ahead_max=2,
        applied_steps_kept=1000 if keeps else 0,
        resume_from_step=step,
        start_id=start_id,
    )


class Process:
    """One life of the orchestrator, and the clients that talk to it."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def run(self) -> None:
        """Until the run has ended, or the ledger fails. Raises LedgerFailed."""
        world = self.world
        metrics = Metrics(CollectorRegistry())
        files = SimulatedFiles(world, metrics)
        records = await world.ledger.load()
        self.choose_start(records)
        own = settings(keeps=world.goes_back, start=world.start)
        resumption = await begin_term(own, world.ledger, records, files, now_s=1000.0)
        assert resumption.report is None or not resumption.report.files_missing
        service = Orchestrator(
            own,
            resumption=resumption,
            model=MODEL,
            ledger=world.ledger,
            files=files,
            metrics=metrics,
            readers=reader_pool(own.body_bytes_max),
            clock_s=lambda: 1000.0,
        )
        service.let_out_resumption()
        feed: Any = SimulatedFeed(world)
        work: list[Awaitable[Any]] = [
            service.journal.run(),
            loops.build_steps(service),
            shipping.ship_steps(service, feed),
            shipping.poll_feed(service, feed),
            loops.keep_time(service),
            loops.forget_sessions(service),
            files.deleter.run(),
            self.environment(service),
            self.ranks(service),
        ]
        tasks = [asyncio.ensure_future(one) for one in work]
        ended = asyncio.ensure_future(self.ended(service))
        await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if ended.done() and ended.exception() is None:
            return
        ended.cancel()
        for task in (*tasks, ended):  # a failed ledger ends the life, anything else the test
            error = None if task.cancelled() or not task.done() else task.exception()
            if error is not None and not isinstance(error, LedgerFailed | Problem):
                raise error
        raise LedgerFailed("the term ended")

    def choose_start(self, records: Records | None) -> None:
        """Now and then the trainer restarts with the process; else that is as it was."""
        world = self.world
        is_over = not world.goes_back or world.starts == STARTS_MAX or records is None
        if is_over or world.random.random() > 0.4:
            return
        assert records is not None, "the run is known"
        book, _ = restore(records, settings(keeps=True).rules())
        if not book.run.is_terminal:
            world.starts += 1
            step = world.random.randint(0, going_back.committed_step(book))
            world.start = (step, f"start-{world.starts}")

    async def environment(self, service: Orchestrator) -> None:
        """Leases, writes files, delivers; repeats whatever was not answered."""
        for name in self.world.names:
            await self.rollout(service, name)
        await self.answered(lambda: service.drain(leases_s=0, deadline_s=1e9))
        await asyncio.Event().wait()  # until the run has ended

    async def rollout(self, service: Orchestrator, name: str) -> None:
        world, number = self.world, int(name[1:])
        asked = LeaseRequest(
            rollout_id=RolloutId(name),
            group_id=GroupId(f"g{number // GROUP_SIZE}"),
            group_size=GROUP_SIZE,
            env_name="",
            session_id=None,
        )
        lease = await self.answered(lambda: service.take_lease(asked))
        known = world.leases.setdefault(name, lease.lease_id)
        assert known == lease.lease_id, "a lease that was given stays"
        if name in world.bad and number % 2:
            if name not in world.acknowledged:
                await self.answered(lambda: service.abort_lease(LeaseId(known)))
                world.acknowledged[name] = "aborted"
            return
        request_id = RequestId(f"{name}.t0")
        file = f"v{lease.policy_version}/run-1/{fan_out(request_id)}/{request_id}-{'0' * 16}.sbp"
        if file not in world.written:  # an engine writes once
            world.written.add(file)
            world.disk.add(file)
        wire = rollout_wire(name, file, is_failed=name in world.bad, reward=float(number % 3))
        receipt = await self.answered(lambda: deliver(service, wire, 100))
        if name not in world.acknowledged:
            world.acknowledged[name] = "dropped" if receipt.reason is not None else "accepted"
            assert (receipt.reason is not None) is (name in world.bad), receipt.detail

    async def answered(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """As a client does it: a 503 is asked again."""
        while True:
            try:
                return await ask()
            except Problem as problem:
                if isinstance(problem, RunEnded):
                    raise
                if problem.status != 503:
                    raise AssertionError(f"{problem.status}: {problem.detail}") from problem
                await asyncio.sleep(0)

    async def ranks(self, service: Orchestrator) -> None:
        """Train, apply, and sometimes lose the feed."""
        world = self.world
        while True:
            await asyncio.sleep(0)
            if world.random.random() < 0.2:
                world.train()
            if world.random.random() < 0.1 and world.applied < world.committed:
                world.applied += 1
                await self.report(service)
            elif world.random.random() < 0.02:
                await self.report(service)
            if world.goes_back and world.returns < RETURNS_MAX and world.random.random() < 0.01:
                await self.go_back(service)
            if world.random.random() < 0.01:
                world.held.clear()  # a feed that was started anew

    async def report(self, service: Orchestrator) -> None:
        """What the engines serve; they follow the trainer when the feed does."""
        version, lineage = self.world.applied, self.world.feed_lineage
        is_known = lineage == service.book.lineage
        await self.answered(
            lambda: service.set_policy_version(
                version, "push", lineage=lineage if is_known else None
            )
        )

    async def go_back(self, service: Orchestrator) -> None:
        """The trainer restarts from an earlier checkpoint; everything is still there."""
        last = going_back.committed_step(service.book)
        step, lineage = self.world.random.randint(0, last), service.book.lineage + 1
        if service.book.run.is_terminal:
            return
        try:
            record = await self.answered(
                lambda: returning.go_back(service, step=step, lineage=lineage)
            )
        except RunEnded:
            return  # just before
        lost = (record.steps_gone, record.steps_moved, record.steps_reduced)
        assert lost == ((), (), ()), record

    async def ended(self, service: Orchestrator) -> None:
        """The run is over, durably, and its deletions are done."""
        assert service.files is not None
        while service.book.run.phase is not Phase.ENDED:
            assert service.book.run.phase is not Phase.STOPPED, service.book.run.reason
            await asyncio.sleep(0)
        await service.settled()
        while service.files.deleter.pending:  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(0)
        await service.settled()


def rollout_wire(name: str, file: str, *, is_failed: bool, reward: float) -> RolloutWire:
    """One turn by handle: three tokens, two rows."""
    segment = PayloadSegment(
        field="routed_experts",
        file=file,
        offset=4096,
        row=0,
        pos=0,
        rows=2,
        dtype="uint8",
        shape=MODEL.row_shape,
    )
    turn = TurnWire(
        request_id=f"{name}.t0",
        prompt_token_ids=np.array([1, 2], "<i4").tobytes(),
        completion_token_ids=np.array([3], "<i4").tobytes(),
        logprobs=np.array([-0.5], "<f4").tobytes(),
        payload_segments=[segment],
    )
    status: Any = "failed" if is_failed else "completed"
    return RolloutWire(rollout_id=name, status=status, reward=reward, turns=[turn])
