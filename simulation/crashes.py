"""Kills processes of a running system at seeded moments, and starts each again as it was.

A supervisor does the same in production: same settings, same address, the disk as it was left.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from simulation.gate import Gate
from simulation.processes import Cluster, Running

KILL_PAUSE_S: Final = (0.05, 0.6)  # between two kills
WORK_PAUSE_S: Final = (0.0, 0.1)  # between the sight of work and the kill
WORK_POLL_S: Final = 0.005
WORK_TIMEOUT_S: Final = 60.0  # until there is some; a busy machine with two cores
IDLE_DEATHS_MAX: Final = 5  # in a row, that do not count
DOWN_S: Final = (0.0, 0.4)  # before it is started again


@dataclass(slots=True, kw_only=True, eq=False)
class Kept:
    """One process that is started again: what runs in it, and what says that it is ready.

    ``is_at_work``: for what may live without any work; then it dies only while it has some.
    """

    running: Running
    target: Callable[..., None]
    settings: Any
    ready_url: str | None = None  # ranks have none
    is_at_work: Callable[[], Awaitable[bool]] | None = None
    is_down: bool = False

    async def kill(self, cluster: Cluster) -> bool:
        """SIGKILL; False where it had ended: a rank that saw the feed's end."""
        if self.is_down or not self.running.process.is_alive():
            return False
        await cluster.kill(self.running)
        self.is_down = True
        return True

    async def start(self, cluster: Cluster, client: httpx.AsyncClient) -> None:
        """Again, as it was. Raises ProcessFailed."""
        self.running = cluster.start(self.running.name, self.target, self.settings)
        self.is_down = False
        if self.ready_url is not None:
            await cluster.ready(self.running, self.ready_url, client)


@dataclass(slots=True, kw_only=True, eq=False)
class Killer:
    """Kills what it keeps, by the seed, and lets work through ``gate`` as the kills go on.

    ``killed`` counts what really died, by kind, and while there was work for it.
    """

    cluster: Cluster
    client: httpx.AsyncClient
    seed: int
    kills_max: int
    gate: Gate
    kept: dict[str, Kept] = field(default_factory=dict)
    killed: "Counter[str]" = field(default_factory=Counter)

    async def run(self) -> None:
        """Kill and start again, one after the other, so many times. Raises ProcessFailed."""
        rng = random.Random(self.seed)
        order = [*self.kept]
        rng.shuffle(order)  # everything dies once before anything dies twice
        for number in range(self.kills_max):
            self.gate.let_share(number / self.kills_max)
            await asyncio.sleep(rng.uniform(*KILL_PAUSE_S))
            name = order[number % len(order)]
            if await self._kill(self.kept[name], rng):
                self.killed[name.rstrip("0123456789-")] += 1
        self.gate.let_share(1.0)

    async def _kill(self, kept: Kept, rng: random.Random) -> bool:
        """Kill it and start it again; whether that was a death that counts."""
        for _ in range(IDLE_DEATHS_MAX):
            if kept.is_at_work is not None:
                self.gate.let_another()
                await self._work_of(kept.is_at_work)
                await asyncio.sleep(rng.uniform(*WORK_PAUSE_S))
            if not await kept.kill(self.cluster):
                return False
            has_counted = kept.is_at_work is None or await kept.is_at_work()
            await asyncio.sleep(rng.uniform(*DOWN_S))
            await kept.start(self.cluster, self.client)
            if has_counted:
                return True
        return False

    async def _work_of(self, is_at_work: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(WORK_TIMEOUT_S):
            while not await is_at_work():  # noqa: ASYNC110 - another process
                await asyncio.sleep(WORK_POLL_S)
