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

from simulation.processes import Cluster, Running

KILL_PAUSE_S: Final = (0.05, 0.6)  # between two kills
DEATHS_TIMEOUT_S: Final = 120.0  # for those that work waits for; a busy machine with two cores
DOWN_S: Final = (0.0, 0.4)  # before it is started again


@dataclass(slots=True, kw_only=True, eq=False)
class Kept:
    """One process that is started again: what runs in it, and what says that it is ready."""

    running: Running
    target: Callable[..., None]
    settings: Any
    ready_url: str | None = None  # ranks have none


@dataclass(slots=True, kw_only=True, eq=False)
class Killer:
    """Kills what it keeps, by the seed. ``others``: more that can die, by name; whether they did.

    ``killed`` counts what really died, by kind; all else that waits for deaths asks ``after``.
    """

    cluster: Cluster
    client: httpx.AsyncClient
    seed: int
    kills_max: int
    kept: dict[str, Kept] = field(default_factory=dict)
    others: dict[str, Callable[[], Awaitable[bool]]] = field(default_factory=dict)
    killed: "Counter[str]" = field(default_factory=Counter)
    done: int = 0  # attempts at a kill that are over, what died being up again
    _progress: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self) -> None:
        """Kill and start again, one after the other, so many times. Raises ProcessFailed."""
        rng = random.Random(self.seed)
        order = [*self.kept, *self.others]
        rng.shuffle(order)  # everything dies once before anything dies twice
        for number in range(self.kills_max):
            await asyncio.sleep(rng.uniform(*KILL_PAUSE_S))
            name = order[number % len(order)]
            if name in self.others:
                has_died = await self.others[name]()
            else:
                has_died = await self._kill(self.kept[name], down_s=rng.uniform(*DOWN_S))
            if has_died:
                self.killed[name.rstrip("0123456789-")] += 1
            async with self._progress:
                self.done += 1
                self._progress.notify_all()

    async def after(self, share: float) -> None:
        """Wait until this share of all kills, rounded up, is over. Raises TimeoutError."""
        async with asyncio.timeout(DEATHS_TIMEOUT_S), self._progress:
            await self._progress.wait_for(lambda: self.done >= share * self.kills_max)

    async def _kill(self, kept: Kept, *, down_s: float) -> bool:
        """Kill it and start it again; False where it had ended: a rank that saw the feed's end."""
        if not kept.running.process.is_alive():
            return False
        await self.cluster.kill(kept.running)
        await asyncio.sleep(down_s)
        kept.running = self.cluster.start(kept.running.name, kept.target, kept.settings)
        if kept.ready_url is not None:
            await self.cluster.ready(kept.running, kept.ready_url, self.client)
        return True
