"""Stage three: one live run with real retention, P/D by handle, checked against the truth."""

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from services.inference_proxy.config import ProxySettings
from simulation import targets
from simulation.calls import RunStopped
from simulation.checker import CheckPlan, Result
from simulation.comparison import Check, Checks
from simulation.environment import Environment, RequestRefused, http_client
from simulation.expected import ExpectedSample, expected_samples
from simulation.generation import Pool, make_root, proxy_settings, start_pool, url_of
from simulation.live import LiveRun
from simulation.models import load_shape
from simulation.plan import make_plan
from simulation.processes import Cluster, ProcessFailed, Running, pick_ports
from simulation.replay import Trainer, end_trainer, start_trainer
from simulation.sample_check import check_ranks
from simulation.strays import emptied
from simulation.topology import Topology
from simulation.truth import Truth

TOPOLOGY = Topology(dp_size=2, cp_size=2, layout="zigzag")


@dataclass(slots=True, kw_only=True, eq=False)
class LiveSystem:
    """Everything that runs, in front of it an environment."""

    pool: Pool
    trainer: Trainer
    proxy: Running
    proxy_settings: ProxySettings

    @property
    def proxy_url(self) -> str:
        """Where environments send their turns."""
        return url_of(self.proxy_settings.port)


async def check_live(plan: CheckPlan, result: Result, *, model: str) -> None:
    """Train while rollouts arrive; weights change under them; at the end no file is left."""
    out = plan.out / "work" / "live"
    rollouts = make_plan(plan.scenario)
    truth = Truth(load_shape(model), seed=plan.scenario.seed)
    expected = await asyncio.to_thread(expected_samples, rollouts, truth, seq_len=plan.seq_len)
    run = result.checks.of("live run: weights change, every step is applied")
    with Cluster(plan.out / "logs" / "live") as cluster:
        async with http_client() as client:
            try:
                system = await start_live(cluster, client, plan, model)
                live = LiveRun(
                    client=client,
                    proxy_url=system.proxy_url,
                    orchestrator_url=system.trainer.orchestrator_url,
                    feed_url=system.trainer.feed_url,
                    engine_urls={
                        engine.name: url_of(engine.port) for engine in system.pool.engines
                    },
                    watch=cluster.check,
                )
                environment = Environment(
                    client=client,
                    proxy_url=system.proxy_url,
                    orchestrator_url=system.trainer.orchestrator_url,
                    vocab_size=truth.model.vocab_size,
                    concurrency=plan.concurrency,
                    evaluates=True,
                )
                await live.run(environment, rollouts)
                assert system.trainer.root is not None, "a live run goes by handle"
                left = await emptied(system.trainer.root)
                await end_trainer(cluster, system.trainer)
            except (RunStopped, ProcessFailed, RequestRefused, TimeoutError) as exc:
                run.add(f"{type(exc).__name__} {exc}")
                return
    traffic = environment.traffic
    wrong = [f"{traffic.evaluations_wrong} requests"] if traffic.evaluations_wrong else []
    inline = result.checks.of("eval requests stay inline beside training by handle")
    inline.add(*wrong, compared=traffic.evaluations)
    await check_end(
        result.checks, out, expected, run=run, live=live, left=left, label="live, P/D by handle"
    )


async def check_end(
    checks: Checks,
    out: Path,
    expected: Mapping[str, ExpectedSample],
    *,
    run: Check,
    live: LiveRun,
    left: Sequence[Path],
    label: str,
) -> None:
    """What holds after every live run: steps were applied, no file is left, each rank got it all.

    ``left`` are the files that the run left in its root. Ends with ``out`` removed.
    """
    run.add(*([] if live.applied > 1 else ["fewer than two steps"]), compared=live.applied)
    checks.of("files left after a run: none").add(*[f"{label}: {path.name}" for path in left])
    await asyncio.to_thread(
        check_ranks,
        checks,
        out,
        expected,
        cp_size=TOPOLOGY.cp_size,
        label=label,
        weight_version_max=live.applied,
    )
    await asyncio.to_thread(shutil.rmtree, out)


async def start_live(
    cluster: Cluster,
    client: httpx.AsyncClient,
    plan: CheckPlan,
    model: str,
    *,
    is_mortal: bool = False,
) -> LiveSystem:
    """Start everything but the environment. ``is_mortal``: ranks keep what a successor needs."""
    out = plan.out / "work" / "live"
    root = await asyncio.to_thread(make_root, out / "root")
    pool = await start_pool(
        cluster,
        client,
        pairing="pd",
        model=model,
        seed=plan.scenario.seed,
        payload_root=root,
        token_latency_s=0.002,
    )
    (port,) = pick_ports(1)
    trainer = await start_trainer(
        cluster,
        client,
        topology=TOPOLOGY,
        model=model,
        root=root,
        out=out,
        seq_len=plan.seq_len,
        step_rollouts=max(2, plan.step_rollouts // 2),
        name="live",
        is_mortal=is_mortal,
        options={"proxy_url": url_of(port), "proxy_poll_s": 0.2, "max_off_policy_steps": 1000},
    )
    settings = proxy_settings(
        pool,
        payload_root=root,
        port=port,
        orchestrator_url=trainer.orchestrator_url,
        workers=plan.proxy_workers,
    )
    proxy = cluster.start("proxy-live", targets.proxy, settings)
    await cluster.ready(proxy, f"{url_of(port)}/readyz", client)
    return LiveSystem(pool=pool, trainer=trainer, proxy=proxy, proxy_settings=settings)
