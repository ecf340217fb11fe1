"""A trainer goes back to an earlier checkpoint while whoever serves it is killed, and comes back.

The trainer is processes too: those of before end by themselves, new ones start from the checkpoint.
The feed is stopped (SIGSTOP), or dead, from before a going back is decided until somebody else has
died of it.
"""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from simulation.calls import answered
from simulation.crashes import DOWN_S, Kept
from simulation.processes import Cluster
from simulation.rank import checkpoint, go_back, has_dumps
from simulation.replay import Trainer
from simulation.return_plan import Part, ReturnPlan

POLL_S: Final = 0.02
WAIT_S: Final = 60.0  # a busy machine with two cores
IN_FLIGHT_S: Final = (0.0, 0.03)  # of a request, when its orchestrator dies
STARTING_S: Final = (0.0, 0.6)  # of an orchestrator that goes back as it starts, when it dies
RE_READ_S: Final = (0.0, 0.1)  # from the first micro batch that is taken again
DONE_STATES: Final = frozenset({"acknowledged", "closed"})


@dataclass(slots=True, kw_only=True, eq=False)
class Returner:
    """Goes back as planned. ``killed`` counts the deaths, by point and part.

    ``records`` are what the run says of each time; what ranks took in a lineage that was left lies
    in a folder of ``aside``.
    """

    cluster: Cluster
    client: httpx.AsyncClient
    trainer: Trainer
    orchestrator: Kept
    feed: Kept
    ranks: list[Kept]
    aside: Path
    rng: random.Random
    killed: "Counter[tuple[str, Part]]" = field(default_factory=Counter)
    records: list[dict[str, Any]] = field(default_factory=list)

    async def go_back(self, plan: ReturnPlan, *, committed_min: int) -> None:
        """Once so many steps are committed. Raises RunStopped, ProcessFailed, TimeoutError."""
        step = await self._committed(committed_min) - plan.steps_back
        for rank in self.ranks:
            rank.running.is_ending = True  # however that comes
        await self._say(plan, step)
        await self._die("between", plan.between)
        await self._wake()
        await self._until(self._have_ranks_ended)
        await self._restart_ranks(step)
        await self._read_again(plan.reading, step)

    async def on_record(self) -> list[dict[str, Any]]:
        """What the run says of each time."""
        answer = await self._get(f"{self.trainer.orchestrator_url}/v1/run/returns")
        found: list[dict[str, Any]] = answer["returns"]
        return found

    async def _say(self, plan: ReturnPlan, step: int) -> None:
        """The run goes back, durably, and the feed does not know."""
        lineage, dies = len(self.records) + 1, plan.before == "orchestrator"
        if plan.before == "feed":
            await self._die("before", "feed")
        else:
            self._signal_feed(signal.SIGSTOP)
        if plan.before == "rank":
            await self._die("before", "rank")
        if plan.is_by_start:
            await self._start(step, f"trainer-{lineage}", dies=dies)
        else:
            await self._ask(step, lineage, dies=dies)
        returns = await self.on_record()
        assert returns[:-1] == self.records, "it went back once, and forgot nothing"
        assert (returns[-1]["lineage"], returns[-1]["step"]) == (lineage, step)
        self.records = returns

    async def _ask(self, step: int, lineage: int, *, dies: bool) -> None:
        """By a request, which is sent again until it is answered."""
        url = f"{self.trainer.orchestrator_url}/v1/admin/go-back"
        asking = asyncio.create_task(
            answered(self.client, "POST", url, {"step": step, "lineage": lineage})
        )
        try:
            if dies:
                await asyncio.sleep(self.rng.uniform(*IN_FLIGHT_S))
                await self._die("before", "orchestrator")
                await self._come_back(self.orchestrator)
            await asking
        finally:
            asking.cancel()

    async def _start(self, step: int, start_id: str, *, dies: bool) -> None:
        """By the settings of a start, which a supervisor repeats."""
        kept = self.orchestrator
        await kept.kill(self.cluster)  # with the job that the trainer was of
        kept.settings = kept.settings.model_copy(
            update={"resume_from_step": step, "start_id": start_id}
        )
        if dies:
            kept.running = self.cluster.start(kept.running.name, kept.target, kept.settings)
            kept.is_down = False
            await asyncio.sleep(self.rng.uniform(*STARTING_S))
            await self._die("before", "orchestrator")
        await kept.start(self.cluster, self.client)

    async def _wake(self) -> None:
        """Feed and orchestrator are there again, and the feed is told."""
        if not self.feed.is_down:
            self._signal_feed(signal.SIGCONT)
        down = [kept for kept in (self.feed, self.orchestrator) if kept.is_down]
        await asyncio.gather(*(self._come_back(kept) for kept in down))
        await self._until(self._is_told)

    async def _restart_ranks(self, step: int) -> None:
        """From the checkpoint, as a trainer does it that resumes."""
        folder = self.aside / f"lineage{len(self.records) - 1}"
        folder.mkdir(parents=True)
        for rank in self.ranks:
            if not rank.is_down:
                self.cluster.forget(rank.running)
            await asyncio.to_thread(go_back, rank.settings, step, folder)
            await rank.start(self.cluster, self.client)

    async def _read_again(self, part: Part, step: int) -> None:
        """One more death while the ranks take their steps again."""

        async def has_begun() -> bool:
            return any(has_dumps(rank.settings, step) for rank in self.ranks)

        await self._until(has_begun)
        await asyncio.sleep(self.rng.uniform(*RE_READ_S))
        last_step = self.records[-1]["last_step"]
        busy = [rank for rank in self.ranks if checkpoint(rank.settings) < last_step]
        await self._die("reading", part, ranks=busy or self.ranks, counts=bool(busy))
        before = [checkpoint(rank.settings) for rank in self.ranks]
        for kept in (self.orchestrator, self.feed, *self.ranks):
            if kept.is_down:
                await self._come_back(kept)

        async def have_gone_on() -> bool:  # each knows of which lineage it is then
            now = [checkpoint(rank.settings) for rank in self.ranks]
            return all(a < b for a, b in zip(before, now, strict=True) if a < last_step)

        await self._until(have_gone_on)

    async def _die(
        self, point: str, part: Part, *, ranks: Sequence[Kept] = (), counts: bool = True
    ) -> None:
        """One process of that kind (of these ``ranks``) dies; it counts if it had lived."""
        kept = {
            "orchestrator": lambda: self.orchestrator,
            "feed": lambda: self.feed,
            "rank": lambda: self.rng.choice(ranks or self.ranks),
        }[part]()
        if await kept.kill(self.cluster) and counts:
            self.killed[point, part] += 1

    async def _come_back(self, kept: Kept) -> None:
        await asyncio.sleep(self.rng.uniform(*DOWN_S))
        await kept.start(self.cluster, self.client)

    def _signal_feed(self, number: signal.Signals) -> None:
        pid = self.feed.running.process.pid
        assert pid is not None, "it was started"
        os.kill(pid, number)

    async def _committed(self, step_min: int) -> int:
        """The last step that the orchestrator knows to be committed; at least this one."""
        last = 0

        async def is_enough() -> bool:
            nonlocal last
            answer = await self._get(f"{self.trainer.orchestrator_url}/v1/steps")
            done = [int(one["step"]) for one in answer["steps"] if one["state"] in DONE_STATES]
            last = max(done, default=0)
            return last >= step_min

        await self._until(is_enough)
        return last

    async def _is_told(self) -> bool:
        answer = await self._get(f"{self.trainer.feed_url}/v1/acknowledgements")
        return bool(answer["lineage"] == len(self.records))

    async def _have_ranks_ended(self) -> bool:
        """All that were not killed: the feed, or what they got of it, tells them to."""
        return not any(r.running.process.is_alive() for r in self.ranks if not r.is_down)

    async def _get(self, url: str) -> dict[str, Any]:
        found: dict[str, Any] = (await answered(self.client, "GET", url)).json()
        return found

    async def _until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not await holds():
                self.cluster.check()
                await asyncio.sleep(POLL_S)
