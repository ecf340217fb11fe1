"""A live run in which every part is killed again and again, checked against the seeded truth.

What must hold at the end: every planned sample was trained exactly once, each rank committed each
step once and in order, every micro batch equals the truth bitwise, and no file is left.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import httpx

from simulation import targets
from simulation.calls import RunStopped
from simulation.checker import CheckPlan, Result
from simulation.crashes import Kept, Killer
from simulation.environment import Environment, RequestRefused, http_client
from simulation.expected import expected_samples
from simulation.generation import url_of
from simulation.live import LiveRun
from simulation.live_check import LiveSystem, check_end, start_live
from simulation.models import load_shape
from simulation.plan import RolloutPlan, make_plan
from simulation.processes import Cluster, ProcessFailed
from simulation.replay import end_trainer
from simulation.strays import emptied
from simulation.truth import Truth

KILLS_MAX = 14  # each of 11 processes and the environment once, some twice


@dataclass(slots=True, kw_only=True, eq=False)
class MortalEnvironment:
    """An environment that dies with all that it knew, and a successor that begins anew.

    Its groups begin one after the other, each after its share of the kills and the last one after
    them all: so there is work whenever something dies, and every part is there to be killed.
    """

    made: Environment
    plans: Sequence[RolloutPlan]
    killer: Killer
    task: "asyncio.Task[None] | None" = None
    deaths: int = 0

    async def run(self, _plans: Sequence[RolloutPlan]) -> None:
        """All rollouts, whatever dies. Raises what the last environment raised."""
        while True:
            self.task = asyncio.create_task(self._all_groups())
            with contextlib.suppress(asyncio.CancelledError):
                await self.task
                return
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise asyncio.CancelledError

    async def _all_groups(self) -> None:
        groups = [list(group) for _, group in groupby(self.plans, key=attrgetter("group_id"))]
        for number, group in enumerate(groups):
            await self.killer.after(number / max(1, len(groups) - 1))
            await self.made.run(group)

    async def die(self) -> bool:
        """Drop every connection and all memory; False where it was done already."""
        if self.task is None or self.task.done():
            return False
        self.deaths += 1
        self.task.cancel()
        return True


async def check_crashes(plan: CheckPlan, result: Result, *, model: str) -> Killer:
    """One run of one seed. What went wrong is in ``result``."""
    out = plan.out / "work" / "live"
    rollouts = make_plan(plan.scenario)
    truth = Truth(load_shape(model), seed=plan.scenario.seed)
    expected = await asyncio.to_thread(expected_samples, rollouts, truth, seq_len=plan.seq_len)
    run = result.checks.of("the run ends whatever dies")
    with Cluster(plan.out / "logs" / "crash") as cluster:
        async with http_client() as client:
            system = await start_live(cluster, client, plan, model, is_mortal=True)
            killer = _killer(cluster, client, system, seed=plan.scenario.seed)
            live, environment = _clients(client, cluster, system, truth, plan)
            mortal = MortalEnvironment(made=environment, plans=rollouts, killer=killer)
            killer.others["environment"] = mortal.die
            try:
                await _run(live, mortal, killer, rollouts)
                assert system.trainer.root is not None, "a live run goes by handle"
                left = await emptied(system.trainer.root)
                system.trainer.ranks = [
                    kept.running for name, kept in killer.kept.items() if name.startswith("rank")
                ]
                system.trainer.orchestrator = killer.kept["orchestrator"].running
                system.trainer.feed = killer.kept["feed"].running
                await end_trainer(cluster, system.trainer)
            except (RunStopped, ProcessFailed, RequestRefused, TimeoutError) as exc:
                run.add(f"{type(exc).__name__} {exc}")
                return killer
    await check_end(
        result.checks, out, expected, run=run, live=live, left=left, label="with crashes"
    )
    return killer


def _killer(
    cluster: Cluster, client: httpx.AsyncClient, system: LiveSystem, *, seed: int
) -> Killer:
    killer = Killer(cluster=cluster, client=client, seed=seed, kills_max=KILLS_MAX)
    trainer = system.trainer
    killer.kept["proxy"] = Kept(
        running=system.proxy,
        target=targets.proxy,
        settings=system.proxy_settings,
        ready_url=f"{system.proxy_url}/healthz",
    )
    killer.kept["orchestrator"] = Kept(
        running=trainer.orchestrator,
        target=targets.orchestrator,
        settings=trainer.orchestrator_settings,
        ready_url=f"{trainer.orchestrator_url}/healthz",
    )
    killer.kept["feed"] = Kept(
        running=trainer.feed,
        target=targets.feed,
        settings=trainer.feed_settings,
        ready_url=f"{trainer.feed_url}/readyz",
    )
    for engine, running in zip(system.pool.engines, system.pool.running, strict=True):
        killer.kept[f"engine-{engine.name}"] = Kept(
            running=running,
            target=targets.engine,
            settings=engine,
            ready_url=f"{url_of(engine.port)}/health",
        )
    for rank, running in zip(trainer.rank_settings, trainer.ranks, strict=True):
        killer.kept[f"rank{rank.global_rank}"] = Kept(
            running=running, target=targets.rank, settings=rank
        )
    return killer


def _clients(
    client: httpx.AsyncClient,
    cluster: Cluster,
    system: LiveSystem,
    truth: Truth,
    plan: CheckPlan,
) -> tuple[LiveRun, Environment]:
    live = LiveRun(
        client=client,
        proxy_url=system.proxy_url,
        orchestrator_url=system.trainer.orchestrator_url,
        feed_url=system.trainer.feed_url,
        engine_urls={engine.name: url_of(engine.port) for engine in system.pool.engines},
        watch=cluster.check,
        is_stubborn=True,
    )
    environment = Environment(
        client=client,
        proxy_url=system.proxy_url,
        orchestrator_url=system.trainer.orchestrator_url,
        vocab_size=truth.model.vocab_size,
        concurrency=plan.concurrency,
        is_stubborn=True,
    )
    return live, environment


async def _run(
    live: LiveRun, mortal: MortalEnvironment, killer: Killer, rollouts: Sequence[RolloutPlan]
) -> None:
    """The run and the killing side by side; an error of either ends both."""
    killing = asyncio.create_task(killer.run())
    running = asyncio.create_task(live.run(mortal, rollouts))
    try:
        await asyncio.wait({killing, running}, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in (killing, running):
            if not task.done():
                task.cancel()
        await asyncio.gather(killing, running, return_exceptions=True)
    # The one that failed, not the one that was cancelled for it.
    for task in sorted((killing, running), key=lambda task: task.cancelled()):
        task.result()
