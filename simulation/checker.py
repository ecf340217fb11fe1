"""The five-way check: the same seeded rollouts from one engine and from a pair, inline, by handle
and spilled by the proxy, through every topology; all compared bitwise with each other and with the
seeded truth.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from sideband.payload import PayloadReader, PayloadRoot
from simulation.calls import RunStopped
from simulation.comparison import Checks
from simulation.corruption import Corruption, corrupt
from simulation.environment import http_client
from simulation.expected import ExpectedSample, expected_samples
from simulation.generation import (
    RUN_ID,
    WAYS,
    Generated,
    Pairing,
    generate,
    make_root,
    start_pool,
)
from simulation.models import load_shape
from simulation.plan import RolloutPlan, Scenario, make_plan
from simulation.processes import Cluster, ProcessFailed
from simulation.replay import replay
from simulation.sample_check import Digests, check_ranks
from simulation.topology import TOPOLOGIES, Measured, Topology
from simulation.truth import Truth
from simulation.turn_check import check_turns

PAIRINGS: Final[tuple[Pairing, ...]] = ("colocated", "pd")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPlan:
    """What is checked, and how much at once."""

    out: Path
    models: tuple[str, ...] = ("sim-uint8", "sim-uint16")
    scenario: Scenario = field(default_factory=Scenario)
    topologies: tuple[Topology, ...] = TOPOLOGIES
    seq_len: int = 512
    concurrency: int = 10
    replays_at_once: int = 3
    corruption: Corruption = "none"
    proxy_workers: int = 1

    @property
    def step_rollouts(self) -> int:
        """So many that a run has several steps."""
        return max(2, self.scenario.rollouts // 4)

    @property
    def work(self) -> int:
        """Units of progress: rollouts and replays."""
        per_model = len(WAYS) * (self.scenario.rollouts + len(self.topologies) * REPLAY_WORK)
        return len(self.models) * per_model


REPLAY_WORK: Final = 20  # a replay takes about as long as twenty rollouts


@dataclass(slots=True, kw_only=True, eq=False)
class Result:
    """All checks, and what each way of each model cost."""

    checks: Checks = field(default_factory=Checks)
    generated: dict[tuple[str, str], Generated] = field(default_factory=dict)
    measured: dict[tuple[str, str, str], Measured] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether nothing differs anywhere."""
        return self.checks.is_good


Progress = Callable[[str, int], None]


async def check_all(plan: CheckPlan, progress: Progress) -> Result:
    """Every model, one after the other. A dead process or a stopped run is a failed check."""
    result = Result()
    async with http_client() as client:
        for model in plan.models:
            with Cluster(plan.out / "logs" / model) as cluster:
                check = ModelCheck(plan, model, result, cluster, client, progress)
                await check.run()
    return result


class ModelCheck:
    """Both stages for one model."""

    def __init__(
        self,
        plan: CheckPlan,
        model: str,
        result: Result,
        cluster: Cluster,
        client: httpx.AsyncClient,
        progress: Progress,
    ) -> None:
        self._plan, self._model, self._result = plan, model, result
        self._cluster, self._client, self._progress = cluster, client, progress
        self._truth = Truth(load_shape(model), seed=plan.scenario.seed)
        self._rollouts: list[RolloutPlan] = make_plan(plan.scenario)
        self._expected: dict[str, ExpectedSample] = {}
        self._digests: dict[tuple[str, str], Digests] = {}
        self._folder = plan.out / "work" / model

    async def run(self) -> None:
        """Generate, damage if asked to, check turns, replay, compare."""
        self._expected = await asyncio.to_thread(
            expected_samples, self._rollouts, self._truth, seq_len=self._plan.seq_len
        )
        for pairing in PAIRINGS:
            await self._generate(pairing)
        ways = [self._result.generated[self._model, way.slug] for way in WAYS]
        for way in ways:
            if corrupt(way, self._plan.corruption):
                break
        if self._plan.corruption == "none":
            for way in ways:
                await asyncio.to_thread(self._check_turns, way)
        await self._replay_all(ways)
        self._compare_ways()
        await asyncio.to_thread(shutil.rmtree, self._folder)

    async def _generate(self, pairing: Pairing) -> None:
        """All forms of one pairing, by the same engines; the proxy writes to a root of its own."""
        root, spilled = [
            await asyncio.to_thread(make_root, self._folder / f"{name}-{pairing}")
            for name in ("root", "spilled")
        ]
        roots = {"inline": None, "handle": root, "spill": spilled}
        pool = await start_pool(
            self._cluster,
            self._client,
            pairing=pairing,
            model=self._model,
            seed=self._plan.scenario.seed,
            payload_root=root,
        )
        for way in WAYS:
            if way.pairing != pairing:
                continue
            self._result.generated[self._model, way.slug] = await generate(
                self._cluster,
                self._client,
                pool,
                self._rollouts,
                way=way,
                model=self._model,
                payload_root=roots[way.form],
                concurrency=self._plan.concurrency,
                on_rollout=lambda: self._progress(f"{self._model}: rollouts", 1),
                workers=self._plan.proxy_workers,
            )
        await self._cluster.end(*pool.running)

    def _check_turns(self, generated: Generated) -> None:
        checks, bodies = self._result.checks, generated.bodies
        if generated.root is None:
            check_turns(checks, self._rollouts, bodies, self._truth, None)
            return
        root = PayloadRoot.open(generated.root, run_id=RUN_ID)
        with PayloadReader(root, model=self._truth.model) as reader:
            check_turns(checks, self._rollouts, bodies, self._truth, reader)

    async def _replay_all(self, ways: Sequence[Generated]) -> None:
        slots = asyncio.Semaphore(self._plan.replays_at_once)

        async def one(generated: Generated, topology: Topology) -> None:
            async with slots:
                await self._replay(generated, topology)
                self._progress(f"{self._model}: training", REPLAY_WORK)

        async with asyncio.TaskGroup() as group:
            for topology in self._plan.topologies:
                for generated in ways:
                    group.create_task(one(generated, topology))

    async def _replay(self, generated: Generated, topology: Topology) -> None:
        checks, slug = self._result.checks, generated.way.slug
        out = self._folder / f"{slug}-{topology.name}"
        out.mkdir()
        run = checks.of("runs end, every rank sees the end")
        try:
            measured = await replay(
                self._cluster,
                self._client,
                generated,
                self._rollouts,
                topology=topology,
                model=self._model,
                out=out,
                seq_len=self._plan.seq_len,
                step_rollouts=self._plan.step_rollouts,
            )
        except (RunStopped, ProcessFailed, TimeoutError) as exc:
            run.add(f"{generated.way.name}, {topology.name}: {type(exc).__name__} {exc}")
            return
        run.add()
        self._result.measured[self._model, slug, topology.name] = measured
        if generated.root is not None:
            stray = [f"{slug} {topology.name}: {measured.files_left} files"]
            checks.of("files left after a run: none").add(
                *(stray if measured.files_left else []), compared=measured.files_used
            )
        self._digests[slug, topology.name] = await asyncio.to_thread(
            check_ranks,
            checks,
            out,
            self._expected,
            cp_size=topology.cp_size,
            label=f"CP {topology.cp_size} {topology.layout}",
        )
        await asyncio.to_thread(shutil.rmtree, out)

    def _compare_ways(self) -> None:
        """Micro batches of all ways are the same bytes, topology by topology."""
        check = self._result.checks.of("micro batches equal in all five ways")
        for topology in self._plan.topologies:
            of_ways = [self._digests.get((way.slug, topology.name), {}) for way in WAYS]
            places = sorted(set().union(*of_ways))
            for place in places:
                values = [digests.get(place) for digests in of_ways]
                differs = any(value != values[0] for value in values)
                name = f"{self._model}, {topology.name}: {place}"
                check.add(*([name] if differs else []))
