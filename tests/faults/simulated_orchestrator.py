"""An orchestrator in one process whose death is simulated between any two steps of its event loop.

What outlives it: the ledger, the feed with its ranks, the payload files, the environment, and what
each of them was told. Everything is seeded; nothing here waits for a clock or a thread.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from services.kit.problems import Problem
from services.kit.turns import TurnWire
from services.orchestrator import going_back, loops, returning, shipping
from services.orchestrator.config import OrchestratorSettings
from services.orchestrator.feed_client import Acknowledgements, HeldSteps
from services.orchestrator.feed_client import FeedCallFailed as CallFailed
from services.orchestrator.files import Files, FilesGone
from services.orchestrator.leasing import LeaseRequest
from services.orchestrator.ledger import LedgerFailed
from services.orchestrator.lifecycle import Phase
from services.orchestrator.metrics import Metrics
from services.orchestrator.records import Change
from services.orchestrator.resuming import resume
from services.orchestrator.service import Orchestrator
from services.orchestrator.wire import RolloutWire
from sideband.feed.codec import decode_step
from sideband.ids import GroupId, LeaseId, RequestId, RolloutId
from sideband.payload.paths import fan_out
from sideband.payload.root import StoredFile
from sideband.segments import PayloadSegment
from tests.services.orchestrator.plain_ledger import PlainLedger
from tests.services.orchestrator.support import MODEL

GROUP_SIZE = 2
STEP_ROLLOUTS = 3
RETURNS_MAX = 3


class Dead(BaseException):
    """The process is gone: whatever still runs of it reaches nothing any more."""


class CrashingLoop(asyncio.SelectorEventLoop):
    """Stops for good after a number of turns: a crash at an await, wherever that is."""

    turns_left = -1

    def _run_once(self) -> None:
        if self.turns_left == 0:
            raise Dead
        self.turns_left -= 1
        super()._run_once()  # type: ignore[misc]


class World:
    """What outlives the process, and the truth to compare with."""

    def __init__(self, seed: int, rollouts: int = 12) -> None:
        self.random = random.Random(seed)
        self.ledger = SimulatedLedger(self)
        self.disk: set[str] = set()
        self.names = [f"r{n}" for n in range(rollouts)]
        self.bad = {name for name in self.names if self.random.random() < 0.15}
        self.acknowledged: dict[str, str] = {}  # rollout: the state of its receipt
        self.leases: dict[str, str] = {}
        self.steps: dict[int, bytes] = {}  # as the ranks first got them
        self.held: set[int] = set()  # by the feed
        self.committed = 0
        self.trained: Counter[str] = Counter()
        self.applied = 0
        self.written: set[str] = set()
        self.goes_back = seed % 2 == 0  # now and then the trainer does
        self.returns = 0
        self.feed_lineage = 0
        self.is_dead = False
        self.crashes = 0

    def check_alive(self) -> None:
        """What a dead process still does reaches nothing."""
        if self.is_dead:
            raise Dead

    def files_of(self, step: int) -> set[str]:
        """What the ranks of a step read."""
        grid = decode_step(self.steps[step]).grid
        return {segment.file for row in grid for b in row for segment in b.segments}  # type: ignore[union-attr]

    def rollouts_of(self, step: int) -> list[str]:
        """Whose samples a step holds."""
        grid = decode_step(self.steps[step]).grid
        names = [span.sample_id for row in grid for b in row for span in b.spans]
        return [name.split("/")[0].rsplit(".", 1)[0] for name in names if name is not None]

    def go_back(self, lineage: int, step: int) -> None:
        """The feed is told: what the trainer did after ``step`` is void, its engines follow."""
        if lineage <= self.feed_lineage:
            return
        for number in range(step + 1, self.committed + 1):
            self.trained.subtract(self.rollouts_of(number))
        self.feed_lineage, self.returns = lineage, self.returns + 1
        self.held = {number for number in self.held if number <= step}
        self.committed, self.applied = min(self.committed, step), min(self.applied, step)

    def train(self) -> None:
        """Every rank reads and commits the next step, if the feed has it."""
        step = self.committed + 1
        if step in self.held:
            assert self.files_of(step) <= self.disk, "a rank's file is gone"
            self.trained.update(self.rollouts_of(step))
            self.held.discard(step)
            self.committed = step


class SimulatedLedger(PlainLedger):
    """Durable between the two awaits of a commit; fails now and then."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    async def commit(self, changes: Sequence[Change]) -> None:
        for _ in range(self.world.random.randrange(3)):
            await asyncio.sleep(0)
        self.world.check_alive()
        is_late = self.world.random.random() < 0.5
        if any(changes) and self.world.random.random() < 0.02:
            if is_late:
                self.apply(changes)  # kept, though nobody is told so
            raise LedgerFailed("as told")
        self.apply(changes)
        for _ in range(self.world.random.randrange(3)):
            await asyncio.sleep(0)


class SimulatedFeed:
    """The feed as its client sees it. A step is the same whenever it comes."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def _pause(self) -> None:
        await asyncio.sleep(0)
        self.world.check_alive()
        if self.world.random.random() < 0.05:
            raise CallFailed("as told")

    async def put_step(self, step: int, body: bytes, *, feed_instance: str | None = None) -> None:
        await self._pause()
        world = self.world
        assert step <= max(world.steps, default=0) + 1, "steps come in order"
        known = world.steps.setdefault(step, body)
        assert known == body, "a rank may have a part of it: a step never changes"
        if step > world.committed:
            world.held.add(step)
        await self._pause()

    async def acknowledgements(self) -> Acknowledgements:
        await self._pause()
        world = self.world
        return Acknowledgements(
            run_id="run-1", committed_step=world.committed or None, lineage=world.feed_lineage
        )

    async def held_steps(self) -> HeldSteps:
        await self._pause()
        steps = [{"step": step} for step in sorted(self.world.held)]
        facts = {"feed_instance": "f", "steps": steps, "lineage": self.world.feed_lineage}
        return msgspec.convert(facts, HeldSteps)

    async def go_back(self, *, lineage: int, step: int, last_step: int) -> None:
        await self._pause()
        self.world.go_back(lineage, step)
        await self._pause()

    async def end(self) -> None:
        await self._pause()


class SimulatedRoot:
    """The payload root as ``Files`` uses it."""

    def __init__(self, world: World) -> None:
        self.world = world

    def delete(self, file: str) -> int:
        self.world.check_alive()
        self.world.disk.discard(file)
        return 1

    def size(self, file: str) -> int | None:
        return 1 if file in self.world.disk else None

    def versions(self) -> list[int]:
        return sorted({int(file[1 : file.index("/")]) for file in self.world.disk})

    def files(self, version: int) -> list[StoredFile]:
        return [
            StoredFile(file=file, size_bytes=1, modified_s=0.0)
            for file in sorted(self.world.disk)
            if file.startswith(f"v{version}/")
        ]

    def remove_version(self, version: int) -> int:
        for stored in self.files(version):
            self.delete(stored.file)
        return 0


class SimulatedReader:
    """Holds no descriptors."""

    def forget(self, file: str) -> None:
        """Nothing to close."""


class SimulatedFiles(Files):
    """No threads: the work is done at the next turn of the loop."""

    def __init__(self, world: World, metrics: Metrics) -> None:
        self.world = world
        root: Any = SimulatedRoot(world)
        reader: Any = SimulatedReader()
        pool: Any = None
        super().__init__(root, reader, pool, metrics, deletes_per_s=1e9)

    def _submit(self, act: Callable[..., Any], *args: object) -> "asyncio.Future[Any]":
        async def later() -> Any:
            await asyncio.sleep(0)
            return act(*args)

        return asyncio.ensure_future(later())

    async def check(self, segments: Sequence[PayloadSegment], *, wait_s: float) -> None:
        await asyncio.sleep(0)
        for segment in segments:
            if segment.file not in self.world.disk:
                raise FilesGone(segment.file)


async def inline(act: Callable[..., Any], *args: object) -> Any:
    """In place of ``asyncio.to_thread``."""
    await asyncio.sleep(0)
    return act(*args)


def settings(*, keeps: bool) -> OrchestratorSettings:
    """Fast loops, small steps; done steps are kept for a trainer that goes back, or not."""
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
        own = settings(keeps=world.goes_back)
        resumption = await resume(own, world.ledger, records, files, now_s=1000.0)
        assert resumption.report is None or not resumption.report.files_missing
        service = Orchestrator(
            own,
            resumption=resumption,
            model=MODEL,
            ledger=world.ledger,
            files=files,
            metrics=metrics,
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
        await asyncio.wait([*tasks[:7], ended], return_when=asyncio.FIRST_COMPLETED)
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

    async def environment(self, service: Orchestrator) -> None:
        """Leases, writes files, delivers; repeats whatever was not answered."""
        for name in self.world.names:
            await self.rollout(service, name)
        await self.answered(lambda: service.drain(leases_s=0, deadline_s=1e9))

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
        receipt = await self.answered(lambda: service.deliver(wire, 100))
        if name not in world.acknowledged:
            world.acknowledged[name] = "dropped" if receipt.reason is not None else "accepted"
            assert (receipt.reason is not None) is (name in world.bad), receipt.detail

    async def answered(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """As a client does it: a 503 is asked again."""
        while True:
            try:
                return await ask()
            except Problem as problem:
                if problem.status != 503:
                    raise
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
        record = await self.answered(lambda: returning.go_back(service, step=step, lineage=lineage))
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
