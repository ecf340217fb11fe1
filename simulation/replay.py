"""Stage two: what one way gave, through orchestrator, feed and ranks of one topology."""

import asyncio
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx

from services.orchestrator.config import OrchestratorSettings
from services.trainer_feed.config import FeedSettings
from sideband.model import ModelShape
from simulation import targets
from simulation.bodies import encode
from simulation.calls import RunStopped, checked
from simulation.generation import RUN_ID, Generated, url_of
from simulation.models import config_path, load_shape
from simulation.plan import RolloutPlan
from simulation.processes import Cluster, Running, pick_ports
from simulation.rank import DONE_SUFFIX, RankSettings
from simulation.strays import emptied, stray_files
from simulation.topology import Measured, Topology

POLL_S: Final = 0.1
RUN_TIMEOUT_S: Final = 120.0
ORCHESTRATOR: Final[dict[str, Any]] = {"feed_poll_s": 0.05, "tick_s": 0.1, "strict_masks": True}
PEER_TIMEOUT_S: Final = 3.0  # a killed rank is known to be dead after it


@dataclass(slots=True, kw_only=True, eq=False)
class Trainer:
    """Orchestrator, feed and ranks of one run."""

    orchestrator: Running
    feed: Running
    ranks: list[Running]
    orchestrator_settings: OrchestratorSettings
    feed_settings: FeedSettings
    rank_settings: list[RankSettings]
    root: Path | None

    @property
    def orchestrator_url(self) -> str:
        """Where rollouts go."""
        return url_of(self.orchestrator_settings.port)

    @property
    def feed_url(self) -> str:
        """Where steps go."""
        return url_of(self.feed_settings.port)

    @property
    def processes(self) -> list[Running]:
        """All of them."""
        return [self.orchestrator, self.feed, *self.ranks]

    async def measure(self, client: httpx.AsyncClient, *, files_used: int) -> Measured:
        """While all of them live."""
        text = (await client.get(f"{self.feed_url}/metrics")).text
        left = [] if self.root is None else await emptied(self.root)
        return Measured(
            step_bytes=int(counter(text, "feed_step_body_bytes_total")),
            feed_bytes=int(counter(text, "feed_sent_bytes_total")),
            orchestrator_grown_bytes=self.orchestrator.grown_bytes(),
            feed_grown_bytes=self.feed.grown_bytes(),
            files_left=len(left),
            files_used=files_used,
        )


async def start_trainer(
    cluster: Cluster,
    client: httpx.AsyncClient,
    *,
    topology: Topology,
    model: str,
    root: Path | None,
    out: Path,
    seq_len: int,
    step_rollouts: int,
    name: str,
    options: dict[str, Any],
    is_mortal: bool = False,
    compute_s: float = 0.0,
) -> Trainer:
    """Start all processes of a trainer. ``options`` are further settings of the orchestrator.

    ``is_mortal``: ranks keep what a successor needs, and the feed lets it in soon.
    ``compute_s`` is how long ranks work on a step.
    """
    orchestrator_port, feed_port, rank_port = pick_ports(3)
    endpoint, shape = f"tcp://127.0.0.1:{rank_port}", load_shape(model)
    grid = _grid(topology)
    feed_settings = _feed_settings(grid, feed_port, endpoint, is_mortal=is_mortal)
    feed = cluster.start(f"feed-{name}", targets.feed, feed_settings)
    settings = OrchestratorSettings(
        port=orchestrator_port,
        payload_root=root,
        model_config_path=config_path(model),
        feed_url=url_of(feed_port),
        seq_len=seq_len,
        step_rollouts=step_rollouts,
        **ORCHESTRATOR,
        **grid,
        **options,
    )
    orchestrator = cluster.start(f"orchestrator-{name}", targets.orchestrator, settings)
    grid_of_ranks = [
        replace(rank, keeps_state=is_mortal, compute_s=compute_s)
        for rank in rank_settings(topology, endpoint, shape, root, out)
    ]
    ranks = [
        cluster.start(f"rank{rank.global_rank}-{name}", targets.rank, rank)
        for rank in grid_of_ranks
    ]
    await cluster.ready(feed, f"{url_of(feed_port)}/readyz", client)
    await cluster.ready(orchestrator, f"{url_of(orchestrator_port)}/healthz", client)
    return Trainer(
        orchestrator=orchestrator,
        feed=feed,
        ranks=ranks,
        orchestrator_settings=settings,
        feed_settings=feed_settings,
        rank_settings=grid_of_ranks,
        root=root,
    )


def _grid(topology: Topology) -> dict[str, Any]:
    return {
        "run_id": RUN_ID,
        "dp_size": topology.dp_size,
        "cp_size": topology.cp_size,
        "layout": topology.layout,
        "log_level": "warning",
    }


def _feed_settings(
    grid: dict[str, Any], port: int, endpoint: str, *, is_mortal: bool
) -> FeedSettings:
    settings = FeedSettings(port=port, endpoint=endpoint, **grid)
    soon = {"peer_timeout_s": PEER_TIMEOUT_S}
    return settings.model_copy(update=soon) if is_mortal else settings


def rank_settings(
    topology: Topology, endpoint: str, model: ModelShape, root: Path | None, out: Path
) -> list[RankSettings]:
    """Every rank of the grid; context-parallel siblings are neighbours."""
    return [
        RankSettings(
            endpoint=endpoint,
            dp_rank=number // topology.cp_size,
            cp_rank=number % topology.cp_size,
            global_rank=number,
            payload_root=root,
            run_id=RUN_ID,
            model=model,
            out=out,
        )
        for number in range(topology.ranks)
    ]


async def replay(
    cluster: Cluster,
    client: httpx.AsyncClient,
    generated: Generated,
    plans: list[RolloutPlan],
    *,
    topology: Topology,
    model: str,
    out: Path,
    seq_len: int,
    step_rollouts: int,
) -> Measured:
    """Deliver every rollout in plan order and train on all of them; ranks' dumps lie in ``out``."""
    root = None if generated.root is None else copy_root(generated.root, out / "root")
    files_used = 0 if root is None else len(stray_files(root))
    trainer = await start_trainer(
        cluster,
        client,
        topology=topology,
        model=model,
        root=root,
        out=out,
        seq_len=seq_len,
        step_rollouts=step_rollouts,
        name=f"{generated.way.slug}-{topology.name}",
        options={
            "initial_policy_version": 0,
            "deterministic": True,
            "max_off_policy_steps": 10_000,
        },
    )
    await _deliver_all(client, trainer, generated, plans)
    await train_to_end(cluster, client, trainer)
    measured = await trainer.measure(client, files_used=files_used)
    await end_trainer(cluster, trainer)
    return replace(measured, rank_grown_bytes=rank_growth(out, topology.ranks))


async def end_trainer(cluster: Cluster, trainer: Trainer) -> None:
    """Wait for the ranks, then end the services. Raises ProcessFailed."""
    await cluster.finished(trainer.ranks, timeout_s=RUN_TIMEOUT_S)
    cluster.forget(*trainer.ranks)
    await cluster.end(trainer.orchestrator, trainer.feed)


def rank_growth(out: Path, ranks: int) -> int:
    """The largest of the ranks' peaks. Raises RunStopped unless every rank saw the end."""
    done = sorted(out.glob(f"*{DONE_SUFFIX}"))
    if len(done) != ranks:
        raise RunStopped(f"{len(done)} of {ranks} ranks saw the end of the feed")
    return max(int(json.loads(path.read_text())["grown_bytes"]) for path in done)


async def lease_all(
    client: httpx.AsyncClient, orchestrator_url: str, plans: list[RolloutPlan]
) -> dict[str, str]:
    """The lease of every rollout, by its id. Raises RunStopped."""
    leases: dict[str, str] = {}
    for plan in plans:
        body = {
            "rollout_id": plan.rollout_id,
            "group_id": plan.group_id,
            "group_size": plan.group_size,
            "env_name": plan.env_name,
        }
        answer = checked(await client.post(f"{orchestrator_url}/v1/leases", json=body))
        leases[plan.rollout_id] = answer.json()["lease_id"]
    return leases


async def _deliver_all(
    client: httpx.AsyncClient,
    trainer: Trainer,
    generated: Generated,
    plans: list[RolloutPlan],
) -> None:
    """Lease all in plan order, then deliver or give up each."""
    url = trainer.orchestrator_url
    leases = await lease_all(client, url, plans)
    for plan in plans:
        if plan.rollout_id not in generated.bodies:
            checked(await client.delete(f"{url}/v1/leases/{leases[plan.rollout_id]}"))
            continue
        content, kind = encode(generated.bodies[plan.rollout_id], is_binary=plan.is_binary)
        headers = {"content-type": kind}
        checked(await client.post(f"{url}/v1/rollouts", content=content, headers=headers))


async def train_to_end(cluster: Cluster, client: httpx.AsyncClient, trainer: Trainer) -> None:
    """Drain, and apply each step's policy once all ranks have committed it, until the run ends.

    Raises RunStopped when it ends otherwise, ProcessFailed when a process dies.
    """
    url, applied = trainer.orchestrator_url, 0
    checked(await client.post(f"{url}/v1/admin/drain"))
    async with asyncio.timeout(RUN_TIMEOUT_S):
        while True:
            cluster.check(*trainer.processes)
            committed = await committed_step(client, trainer)
            if committed > applied:
                applied = committed
                body = {"policy_version": applied}
                checked(await client.put(f"{url}/v1/policy-version", json=body))
            run = checked(await client.get(f"{url}/v1/run")).json()
            if run["phase"] == "ended":
                return
            if run["phase"] == "stopped" or run["feed_failure"]:
                raise RunStopped(run["reason"] or run["feed_failure"])
            await asyncio.sleep(POLL_S)


async def committed_step(client: httpx.AsyncClient, trainer: Trainer) -> int:
    """The last step that every rank has committed; 0 before the first."""
    answer = checked(await client.get(f"{trainer.feed_url}/v1/acknowledgements"))
    return int(answer.json()["committed_step"] or 0)


def copy_root(source: Path, target: Path) -> Path:
    """The same payload files under another root: hard links, so that a delete takes only one."""
    shutil.copytree(source, target, copy_function=os.link)
    return target


def counter(text: str, name: str) -> float:
    """The sum of a metric over its labels, out of Prometheus' text form."""
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((f"{name} ", f"{name}{{"))
    )
