"""Stage one: the planned rollouts through a real proxy and engines, one of the five ways."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import httpx

from services.inference_proxy.config import EngineSettings as ProxyEngine
from services.inference_proxy.config import ProxySettings
from sideband.ids import RunId
from sideband.payload import PayloadRoot
from sideband.payload.encodings import Encodings
from simulation import targets
from simulation.bodies import Json
from simulation.engine.settings import EngineSettings, Role
from simulation.environment import Environment, Traffic
from simulation.models import config_path, load_shape
from simulation.plan import RolloutPlan
from simulation.processes import Cluster, Running, pick_ports

Pairing = Literal["colocated", "pd"]
Form = Literal["inline", "handle", "spill"]
RUN_ID: Final = RunId("simulation")
LABELS: Final[dict[Form, str]] = {
    "inline": "inline",
    "handle": "by handle",
    "spill": "spilled by the proxy",
}
# By handle each pairing writes in other encodings, and the proxy packs: what trains must not show.
ENCODINGS: Final[dict[Pairing, Encodings]] = {
    "colocated": Encodings(routing="raw", masks="others-rice"),
    "pd": Encodings(routing="packed", masks="csr-bits"),
}
ROLES: Final[dict[Pairing, tuple[Role, ...]]] = {
    "colocated": ("colocated", "colocated"),
    "pd": ("prefill", "prefill", "decode", "decode"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How rows come from the engines: from one or from a pair, in the answer, in a file of theirs,
    or in one that the proxy writes from the answer.
    """

    pairing: Pairing
    form: Form

    @property
    def name(self) -> str:
        """For people."""
        return f"{'P/D' if self.pairing == 'pd' else 'colocated'} {self.label}"

    @property
    def label(self) -> str:
        """The form in words."""
        return LABELS[self.form]

    @property
    def slug(self) -> str:
        """For file names."""
        return f"{self.pairing}-{self.form}"


# The proxy spills each leg of a pair, so a pair shows all that it does for one engine.
WAYS: Final = (
    Way(pairing="colocated", form="inline"),
    Way(pairing="colocated", form="handle"),
    Way(pairing="pd", form="inline"),
    Way(pairing="pd", form="handle"),
    Way(pairing="pd", form="spill"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generated:
    """What one way gave. ``root`` holds its payload files, for a way that is not inline."""

    way: Way
    bodies: dict[str, Json]
    traffic: Traffic
    root: Path | None
    counters: dict[str, int]
    proxy_grown_bytes: int


@dataclass(slots=True, kw_only=True, eq=False)
class Pool:
    """The engines of one pairing; a proxy per form may stand in front of them."""

    engines: list[EngineSettings]
    running: list[Running]

    async def counters(self, client: httpx.AsyncClient) -> dict[str, int]:
        """The sum of all engines' counters."""
        total: dict[str, int] = {}
        for engine in self.engines:
            answer = await client.get(f"{url_of(engine.port)}/simulation/counters")
            for name, value in answer.json().items():
                if isinstance(value, int):
                    total[name] = total.get(name, 0) + value
        return total


def url_of(port: int) -> str:
    """A service of this machine."""
    return f"http://127.0.0.1:{port}"


async def start_pool(
    cluster: Cluster,
    client: httpx.AsyncClient,
    *,
    pairing: Pairing,
    model: str,
    seed: int,
    payload_root: Path | None,
    token_latency_s: float = 0.0005,
) -> Pool:
    """Engines that preempt and disobey now and then, and die of a wrong first row."""
    roles = ROLES[pairing]
    ports = pick_ports(len(roles))
    engines = [
        EngineSettings(
            name=f"{role}-{index}",
            role=role,
            model=model,
            seed=seed,
            port=port,
            payload_root=payload_root,
            preemption_rate=0.2,
            disobedience_rate=0.3,
            is_fragile=True,
            token_latency_s=token_latency_s,
            encodings=ENCODINGS[pairing],
        )
        for index, (role, port) in enumerate(zip(roles, ports, strict=True))
    ]
    running = [
        cluster.start(f"engine-{pairing}-{engine.name}", targets.engine, engine)
        for engine in engines
    ]
    for engine, process in zip(engines, running, strict=True):
        await cluster.ready(process, f"{url_of(engine.port)}/health", client)
    return Pool(engines=engines, running=running)


def proxy_settings(
    pool: Pool,
    *,
    payload_root: Path | None,
    port: int,
    orchestrator_url: str | None = None,
    spills: bool = False,
    workers: int = 1,
) -> ProxySettings:
    """A proxy in front of a pool; by handle with a root, inline without. ``spills``: it writes."""
    return ProxySettings(
        port=port,
        workers=workers,
        log_level="warning",
        engines=tuple(
            ProxyEngine(
                name=engine.name,
                url=url_of(engine.port),
                role=engine.role,
                spill="proxy" if spills else "engine",
            )
            for engine in pool.engines
        ),
        payload_root=payload_root,
        run_id=RUN_ID if payload_root else None,
        model_config_path=config_path(pool.engines[0].model) if spills else None,
        routing_encoding="packed" if spills else "raw",
        orchestrator_url=orchestrator_url,
        probe_interval_s=0.2,
        delete_grace_s=0.5,
    )


async def generate(
    cluster: Cluster,
    client: httpx.AsyncClient,
    pool: Pool,
    plans: list[RolloutPlan],
    *,
    way: Way,
    model: str,
    payload_root: Path | None,
    concurrency: int,
    on_rollout: Callable[[], None],
    workers: int = 1,
) -> Generated:
    """Run all plans one way. The proxy of the way lives only as long."""
    (port,) = pick_ports(1)
    spills = way.form == "spill"
    settings = proxy_settings(
        pool, payload_root=payload_root, port=port, spills=spills, workers=workers
    )
    before = await pool.counters(client)
    proxy = cluster.start(f"proxy-{way.slug}", targets.proxy, settings)
    await cluster.ready(proxy, f"{url_of(port)}/readyz", client)
    environment = Environment(
        client=client,
        proxy_url=url_of(port),
        orchestrator_url=None,
        vocab_size=load_shape(model).vocab_size,
        concurrency=concurrency,
        on_rollout=on_rollout,
    )
    await environment.run(plans)
    grown_bytes = proxy.grown_bytes()
    await cluster.end(proxy)  # its last deletes are done then
    after = await pool.counters(client)
    return Generated(
        way=way,
        bodies=environment.bodies,
        traffic=environment.traffic,
        root=payload_root,
        counters={name: after[name] - before.get(name, 0) for name in after},
        proxy_grown_bytes=grown_bytes,
    )


def make_root(path: Path) -> Path:
    """A fresh payload root of the simulated run."""
    PayloadRoot.create(path, RUN_ID, fresh=True)
    return path
