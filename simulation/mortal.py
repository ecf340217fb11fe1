"""The environment as a process of its own, which may be killed: a successor begins anew.

It keeps nothing on a disk. Its groups run one after the other, each when the gate lets it through.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Final

from simulation.environment import Environment, http_client
from simulation.gate import Gate
from simulation.plan import RolloutPlan, Scenario, make_plan

POLL_S: Final = 0.05
END_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MortalSettings:
    """Whom it talks to, what it plays, and the file that says that all of it is done."""

    proxy_url: str
    orchestrator_url: str
    vocab_size: int
    concurrency: int
    scenario: Scenario
    gate: Gate
    done: Path


async def run_mortal(settings: MortalSettings) -> None:
    """All groups. Raises RequestRefused, httpx errors, and TimeoutError at a gate that stays."""
    plans = make_plan(settings.scenario)
    async with http_client() as client:
        environment = Environment(
            client=client,
            proxy_url=settings.proxy_url,
            orchestrator_url=settings.orchestrator_url,
            vocab_size=settings.vocab_size,
            concurrency=settings.concurrency,
            is_stubborn=True,
        )
        groups = [list(group) for _, group in groupby(plans, key=attrgetter("group_id"))]
        for number, group in enumerate(groups):
            await settings.gate.passed(number)
            await environment.run(group)
    settings.done.touch()


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The process, seen from outside: over when whichever successor says that all is done."""

    done: Path

    async def run(self, _plans: Sequence[RolloutPlan]) -> None:
        """Raises TimeoutError. A process that failed is for the cluster to see."""
        async with asyncio.timeout(END_TIMEOUT_S):
            while not self.done.exists():  # noqa: ASYNC110 - another process
                await asyncio.sleep(POLL_S)
