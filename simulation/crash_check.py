"""A live run in which every part is killed again and again, checked against the seeded truth.

What must hold at the end: every planned sample was trained exactly once, each rank committed each
step once and in order, every micro batch equals the truth bitwise, and no file is left.
"""

import asyncio
from collections.abc import Sequence

import httpx

from simulation import targets
from simulation.calls import RunStopped
from simulation.checker import CheckPlan, Result
from simulation.crashes import Kept, Killer
from simulation.environment import RequestRefused, http_client
from simulation.expected import expected_samples
from simulation.gate import Gate
from simulation.generation import url_of
from simulation.live import LiveRun
from simulation.live_check import LiveSystem, check_end, start_live
from simulation.models import load_shape
from simulation.mortal import MortalSettings, Watched
from simulation.plan import RolloutPlan, make_plan
from simulation.processes import Cluster, ProcessFailed
from simulation.replay import end_trainer
from simulation.strays import emptied
from simulation.truth import Truth

KILLS_MAX = 14  # each of 12 processes once, two of them twice


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
            killer = _killer(cluster, client, system, plan)
            live = _live(client, cluster, system)
            try:
                watched = _start_environment(killer, system, truth, plan)
                await _run(live, watched, killer, rollouts)
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
    cluster: Cluster, client: httpx.AsyncClient, system: LiveSystem, plan: CheckPlan
) -> Killer:
    killer = Killer(
        cluster=cluster,
        client=client,
        seed=plan.scenario.seed,
        kills_max=KILLS_MAX,
        gate=Gate(path=plan.out / "work" / "gate", groups=plan.scenario.groups),
    )
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


def _live(client: httpx.AsyncClient, cluster: Cluster, system: LiveSystem) -> LiveRun:
    return LiveRun(
        client=client,
        proxy_url=system.proxy_url,
        orchestrator_url=system.trainer.orchestrator_url,
        feed_url=system.trainer.feed_url,
        engine_urls={engine.name: url_of(engine.port) for engine in system.pool.engines},
        watch=cluster.check,
        is_stubborn=True,
    )


def _start_environment(
    killer: Killer, system: LiveSystem, truth: Truth, plan: CheckPlan
) -> Watched:
    """Start it as the last process that may die. It is at work while a lease is open."""
    settings = MortalSettings(
        proxy_url=system.proxy_url,
        orchestrator_url=system.trainer.orchestrator_url,
        vocab_size=truth.model.vocab_size,
        concurrency=plan.concurrency,
        scenario=plan.scenario,
        gate=killer.gate,
        done=plan.out / "work" / "environment.done",
    )

    async def has_leases() -> bool:
        run = await killer.client.get(f"{settings.orchestrator_url}/v1/run")
        return bool(run.json()["leases_open"])

    killer.gate.let_share(0.0)
    killer.kept["environment"] = Kept(
        running=killer.cluster.start("environment", targets.environment, settings),
        target=targets.environment,
        settings=settings,
        is_at_work=has_leases,
    )
    return Watched(done=settings.done)


async def _run(
    live: LiveRun, watched: Watched, killer: Killer, rollouts: Sequence[RolloutPlan]
) -> None:
    """The run and the killing side by side; an error of either ends both."""
    killing = asyncio.create_task(killer.run())
    running = asyncio.create_task(live.run(watched, rollouts))
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
