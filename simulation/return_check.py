"""A trainer goes back to earlier checkpoints while those around it are killed, by seed.

What must hold at the end: what the ranks took again is what they had taken, bitwise; of what counts
in the end every planned sample was trained exactly once, as the seeded truth has it; every going
back is on record once and dropped nothing; no file is left.
"""

import asyncio
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from simulation import targets
from simulation.assembly import load_dumps
from simulation.bodies import encode
from simulation.calls import RunStopped, answered
from simulation.checker import CheckPlan, Result
from simulation.comparison import Check
from simulation.crashes import Kept
from simulation.environment import http_client
from simulation.expected import ExpectedSample, expected_samples
from simulation.generation import WAYS, Generated, generate, make_root, start_pool
from simulation.live_check import TOPOLOGY
from simulation.models import load_shape
from simulation.plan import RolloutPlan, make_plan
from simulation.processes import Cluster, ProcessFailed
from simulation.replay import Trainer, copy_root, end_trainer, lease_all, start_trainer
from simulation.return_crashes import Returner
from simulation.return_plan import plan_returns
from simulation.sample_check import Digests, check_ranks
from simulation.strays import emptied
from simulation.truth import Truth

RETURNS: Final = 2  # of each seed
STEP_ROLLOUTS: Final = 3
COMPUTE_S: Final = 0.15  # of a step: less, and all is trained before anybody can die
DELIVERY_PAUSE_S: Final = 0.05  # rollouts arrive while the trainer goes back, too
POLL_S: Final = 0.05
END_TIMEOUT_S: Final = 120.0
WAY: Final = next(way for way in WAYS if way.slug == "pd-handle")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Material:
    """Rollouts as an environment delivers them, their files, and what must come of them."""

    generated: Generated
    plans: list[RolloutPlan]
    expected: Mapping[str, ExpectedSample]
    model: str


async def make_material(plan: CheckPlan, *, model: str) -> Material:
    """By real engines behind a real proxy, once for many seeds of deaths."""
    plans, root = make_plan(plan.scenario), make_root(plan.out / "root")
    truth = Truth(load_shape(model), seed=plan.scenario.seed)
    expected = await asyncio.to_thread(expected_samples, plans, truth, seq_len=plan.seq_len)
    with Cluster(plan.out / "logs") as cluster:
        async with http_client() as client:
            pool = await start_pool(
                cluster,
                client,
                pairing=WAY.pairing,
                model=model,
                seed=plan.scenario.seed,
                payload_root=root,
            )
            generated = await generate(
                cluster,
                client,
                pool,
                plans,
                way=WAY,
                model=model,
                payload_root=root,
                concurrency=plan.concurrency,
                on_rollout=lambda: None,
            )
    return Material(generated=generated, plans=plans, expected=expected, model=model)


async def check_returns(
    material: Material, plan: CheckPlan, result: Result, *, seed: int
) -> Returner:
    """One run of one seed of deaths. What went wrong is in ``result``."""
    out = plan.out / "work"
    run = result.checks.of("the trainer goes back, and the run ends, whatever dies")
    with Cluster(plan.out / "logs" / "returns") as cluster:
        async with http_client() as client:
            trainer = await _start(cluster, client, material, plan, out)
            returner = _returner(cluster, client, trainer, out, seed=seed)
            try:
                await _run(returner, material, seed=seed)
                assert trainer.root is not None, "it goes by handle"
                left = await emptied(trainer.root)
                await _end(returner)
            except (RunStopped, ProcessFailed, TimeoutError) as exc:
                run.add(f"{type(exc).__name__} {exc}")
                return returner
    for record in returner.records:
        names = ("steps_reduced", "steps_moved", "steps_gone", "rollouts_dropped", "files_missing")
        run.add(*[f"lineage {record['lineage']}: {name}" for name in names if record[name]])
    result.checks.of("files left after a run: none").add(*[path.name for path in left])
    digests = check_ranks(
        result.checks, out, material.expected, cp_size=TOPOLOGY.cp_size, label="after going back"
    )
    again = result.checks.of("what is taken again is what was taken")
    _compare_lineages(again, returner.aside, digests)
    await asyncio.to_thread(shutil.rmtree, out)
    return returner


async def _start(
    cluster: Cluster, client: httpx.AsyncClient, material: Material, plan: CheckPlan, out: Path
) -> Trainer:
    assert material.generated.root is not None, "it goes by handle"
    out.mkdir(parents=True)  # noqa: ASYNC240 - one folder
    root = await asyncio.to_thread(copy_root, material.generated.root, out / "root")
    return await start_trainer(
        cluster,
        client,
        topology=TOPOLOGY,
        model=material.model,
        root=root,
        out=out,
        seq_len=plan.seq_len,
        step_rollouts=STEP_ROLLOUTS,
        name="returns",
        is_mortal=True,
        compute_s=COMPUTE_S,
        options={
            "initial_policy_version": 0,
            "max_off_policy_steps": 10_000,
            "applied_steps_kept": 1000,
        },
    )


def _returner(
    cluster: Cluster, client: httpx.AsyncClient, trainer: Trainer, out: Path, *, seed: int
) -> Returner:
    return Returner(
        cluster=cluster,
        client=client,
        trainer=trainer,
        orchestrator=Kept(
            running=trainer.orchestrator,
            target=targets.orchestrator,
            settings=trainer.orchestrator_settings,
            ready_url=f"{trainer.orchestrator_url}/healthz",
        ),
        feed=Kept(
            running=trainer.feed,
            target=targets.feed,
            settings=trainer.feed_settings,
            ready_url=f"{trainer.feed_url}/readyz",
        ),
        ranks=[
            Kept(running=running, target=targets.rank, settings=rank)
            for rank, running in zip(trainer.rank_settings, trainer.ranks, strict=True)
        ],
        aside=out / "aside",
        rng=random.Random(seed),
    )


async def _run(returner: Returner, material: Material, *, seed: int) -> None:
    """Deliver, train and apply; go back now and then; at last, end."""
    leases = await lease_all(returner.client, returner.trainer.orchestrator_url, material.plans)
    try:
        async with asyncio.TaskGroup() as group:
            delivering = group.create_task(_deliver(returner, material, leases))
            applying = group.create_task(_apply(returner))
            for number, each in enumerate(plan_returns(seed, count=RETURNS)):
                await returner.go_back(each, committed_min=3 + number)
            await delivering
            await _drain(returner)
            assert await returner.on_record() == returner.records, "no restart went back again"
            applying.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # one cause is enough to stop


async def _drain(returner: Returner) -> None:
    url = returner.trainer.orchestrator_url
    await answered(returner.client, "POST", f"{url}/v1/admin/drain")
    async with asyncio.timeout(END_TIMEOUT_S):
        while True:
            run = (await answered(returner.client, "GET", f"{url}/v1/run")).json()
            if run["phase"] == "ended":
                return
            if run["phase"] == "stopped" or run["feed_failure"]:
                raise RunStopped(run["reason"] or run["feed_failure"])
            returner.cluster.check()
            await asyncio.sleep(POLL_S)


async def _deliver(returner: Returner, material: Material, leases: Mapping[str, str]) -> None:
    """Every rollout in plan order, one after the other; each repeated until it is answered."""
    url, client = returner.trainer.orchestrator_url, returner.client
    for plan in material.plans:
        body = material.generated.bodies.get(plan.rollout_id)
        if body is None:
            await answered(client, "DELETE", f"{url}/v1/leases/{leases[plan.rollout_id]}")
            continue
        content, kind = encode(body, is_binary=plan.is_binary)
        headers = {"content-type": kind}
        await answered(client, "POST", f"{url}/v1/rollouts", content=content, headers=headers)
        await asyncio.sleep(DELIVERY_PAUSE_S)


async def _apply(returner: Returner) -> None:
    """The engines serve what the ranks of the run's lineage have committed."""
    trainer, client = returner.trainer, returner.client
    while True:
        done = (await answered(client, "GET", f"{trainer.feed_url}/v1/acknowledgements")).json()
        if done["committed_step"]:
            body: dict[str, Any] = {
                "policy_version": done["committed_step"],
                "lineage": done["lineage"],
            }
            url = f"{trainer.orchestrator_url}/v1/policy-version"
            await answered(client, "PUT", url, body, fine={httpx.codes.CONFLICT})
        await asyncio.sleep(POLL_S)


async def _end(returner: Returner) -> None:
    """Every process ends by itself, or when it is told to. Raises ProcessFailed."""
    trainer = returner.trainer
    trainer.ranks = [kept.running for kept in returner.ranks]
    trainer.orchestrator, trainer.feed = returner.orchestrator.running, returner.feed.running
    await end_trainer(returner.cluster, trainer)


def _compare_lineages(check: Check, aside: Path, digests: Digests) -> None:
    """Each micro batch that a rank took in a lineage that was left, with the one that counts."""
    for folder in sorted(aside.iterdir()):
        dumps = load_dumps(folder)
        check.add(*([] if dumps else [f"{folder.name}: no rank had taken anything"]), compared=0)
        for dump in dumps:
            own = digests.get(dump.place, ())[dump.plain["cp_rank"]]
            is_equal = own == dump.plain["digest"]
            check.add(*([] if is_equal else [f"{folder.name}: {dump.place}"]))
