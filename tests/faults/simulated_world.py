"""What outlives a simulated orchestrator: ledger, feed, ranks, payload files, the environment.

And the loop that dies. Everything is seeded.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from services.orchestrator.feed_client import Acknowledgements, HeldSteps
from services.orchestrator.feed_client import FeedCallFailed as CallFailed
from services.orchestrator.files import Files, FilesGone
from services.orchestrator.ledger import LedgerFailed
from services.orchestrator.metrics import Metrics
from services.orchestrator.records import Change
from services.orchestrator.storage import tables
from sideband.feed.ancestry import Line
from sideband.feed.codec import decode_step
from sideband.payload.root import StoredFile
from sideband.segments import PayloadSegment
from tests.services.orchestrator.plain_ledger import PlainLedger


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
        self.start: tuple[int, str] | None = None  # the checkpoint that the process is started with
        self.starts = 0
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

    def digest_of(self, step: int) -> str | None:
        """Of the body of a step that is durable."""
        row = self.tables[tables.STEPS].get((step,))
        return None if row is None else str(row["digest"])

    @property
    def lineage(self) -> int:
        """How often the trainer went back, durably."""
        return max((int(row["lineage"]) for row in self.tables[tables.RETURNS].values()), default=0)


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
        assert world.ledger.digest_of(step) == sha256(body).hexdigest(), "a crash could change it"
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

    async def go_back(self, line: Line, *, last_step: int) -> None:
        await self._pause()
        lineage, step = line[-1]
        assert lineage <= self.world.ledger.lineage, "a crash could forget it"
        self.world.go_back(lineage, step)
        await self._pause()

    async def end(self, *, feed_instance: str) -> None:
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
