"""The inference proxy in front of a stub engine: what it adds, and how much it carries."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import orjson

from bench.http.bodies import LARGE, RUN_ID, SMALL, Traffic
from bench.http.load import Load, SessionUse, run
from bench.http.processes import (
    family,
    free_port,
    peak_bytes,
    processor_s,
    server,
    wait_until_ready,
)
from bench.registry import Row
from bench.results import Claim, Measurement, RowResult
from bench.scale import Scale
from sideband.ids import RunId
from sideband.payload.root import PayloadRoot

TRAIN: Final = {"x-sideband-kind": "train"}
ENGINE: Final = "limit: the stub engine alone"
OURS: Final = "Sideband's proxy, one worker"
TWO: Final = "Sideband's proxy, two workers"
CORES_FOR_TWO: Final = 4  # the client and the engine take a core each
NAIVE: Final = "FastAPI + httpx, naive"
BARE: Final = "aiohttp, bare"
EMPTY: Final = "limit: an empty FastAPI handler"
DELAY_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Target:
    """A running server."""

    port: int
    pid: int
    headers: Mapping[str, str]


@contextmanager
def targets(delay_s: float, *, with_two: bool = False) -> Iterator[dict[str, Target]]:
    """The engine and everything in front of it, each a process of its own; ``with_two`` also the
    proxy with two workers.
    """
    with ExitStack() as stack:
        engine_port = free_port()
        pid = stack.enter_context(
            server(["-m", "bench.http.engine", str(engine_port), str(delay_s)], engine_port)
        )
        engine_url = f"http://127.0.0.1:{engine_port}"
        found = {ENGINE: Target(engine_port, pid, {})}
        for name, kind in ((NAIVE, "fastapi-httpx"), (BARE, "aiohttp"), (EMPTY, "fastapi-empty")):
            port = free_port()
            arguments = ["-m", "bench.baseline.forwarders", kind, str(port), engine_url]
            found[name] = Target(port, stack.enter_context(server(arguments, port)), {})
        root = Path(stack.enter_context(TemporaryDirectory(prefix="sideband-bench-"))) / "payloads"
        PayloadRoot.create(root, RunId(RUN_ID), fresh=True)
        found[OURS] = stack.enter_context(_proxy(engine_url, root, workers=1))
        if with_two:
            found[TWO] = stack.enter_context(_proxy(engine_url, root, workers=2))
        yield found


@contextmanager
def _proxy(engine_url: str, root: Path, *, workers: int) -> Iterator[Target]:
    port = free_port()
    environment = {
        "SIDEBAND_PROXY_PORT": str(port),
        "SIDEBAND_PROXY_WORKERS": str(workers),
        "SIDEBAND_PROXY_ENGINES": orjson.dumps([{"name": "e0", "url": engine_url}]).decode(),
        "SIDEBAND_PROXY_PAYLOAD_ROOT": str(root),
        "SIDEBAND_PROXY_LOG_LEVEL": "warning",
    }
    with server(["-m", "services.inference_proxy"], port, environment=environment) as pid:
        wait_until_ready(port)  # each worker has its own view of the engine
        yield Target(port, pid, TRAIN)


def measure_added(scale: Scale) -> RowResult:
    """Added median latency with an engine that takes 200 ms, 64 in flight."""
    in_flight = scale.pick(tiny=2, quick=64, full=64)
    delay_s = scale.pick(tiny=0.0, quick=DELAY_S, full=DELAY_S)
    rounds = scale.pick(tiny=1, quick=3, full=5)
    measurements: list[Measurement] = []
    claims: list[Claim] = []
    with targets(delay_s) as found:
        for traffic, target_ms in ((SMALL, 1.0), (LARGE, 1.5)):
            loads = _rounds(
                {name: one for name, one in found.items() if name != EMPTY},
                traffic,
                in_flight=in_flight,
                requests=in_flight * scale.pick(tiny=2, quick=4, full=12),
                rounds=rounds,
                spread_s=delay_s,
            )
            measurements += [_latency(name, traffic, loads[name], found[name]) for name in loads]
            claims += [
                Claim(
                    what=f"added to the median, {traffic.name}",
                    value=_added_ms(loads, OURS),
                    unit="ms",
                    target=target_ms,
                    is_ceiling=True,
                ),
                Claim(
                    what=f"a naive one adds, {traffic.name}",
                    value=_added_ms(loads, NAIVE),
                    unit="ms",
                ),
            ]
    return RowResult(
        name="proxy_added",
        title="Latency that the proxy adds",
        setting=f"an engine that answers after {delay_s * 1e3:.0f} ms, {in_flight} in flight, "
        "begun evenly over that time (clients that begin together stay together, and their queue "
        "would be measured); "
        f"small bodies: {SMALL.prompt_tokens} + {SMALL.completion_tokens} tokens, large: "
        f"{LARGE.prompt_tokens} + {LARGE.completion_tokens}; train requests by handle",
        measurements=measurements,
        claims=claims,
    )


def measure_saturated(scale: Scale) -> RowResult:
    """Requests per second of one worker and of two, small bodies, 32 in flight."""
    in_flight = scale.pick(tiny=2, quick=32, full=32)
    with targets(0.0, with_two=True) as found:
        loads = _rounds(
            found,
            SMALL,
            in_flight=in_flight,
            requests=in_flight * scale.pick(tiny=2, quick=50, full=200),
            rounds=scale.pick(tiny=1, quick=3, full=7),
        )
        measurements = [
            Measurement(
                side=name,
                seconds=median(load.p50_s for load in loads[name]),
                peak_bytes=sum(map(peak_bytes, family(found[name].pid))),
                rate=median(load.rate for load in loads[name]),
                rate_unit="requests/s",
            )
            for name in loads
        ]
        sessions = _sessions(scale, found, in_flight)
    pairs = list(zip(loads[OURS], loads[BARE], loads[NAIVE], loads[TWO], strict=True))
    return RowResult(
        name="proxy_saturated",
        title="The proxy saturated",
        setting=f"small bodies, {in_flight} in flight, an engine that answers at once; client, "
        "proxy and engine share the machine's cores. Seconds are the median of a request. Two "
        f"workers have a target where there are {CORES_FOR_TWO} cores; their processor time says "
        "what they cost on any machine",
        measurements=measurements,
        claims=[
            Claim(
                what="of a bare aiohttp forwarder's requests per second",
                value=100 * median(ours.rate / bare.rate for ours, bare, _, _ in pairs),
                unit="%",
                target=65,
            ),
            Claim(
                what="of a naive FastAPI + httpx forwarder's",
                value=median(ours.rate / naive.rate for ours, _, naive, _ in pairs),
                unit="×",
            ),
            Claim(
                what="two workers, of one worker's requests per second",
                value=median(two.rate / ours.rate for ours, _, _, two in pairs),
                unit="×",
                target=1.8 if (os.cpu_count() or 1) >= CORES_FOR_TWO else None,
            ),
            *sessions,
        ],
    )


def _sessions(scale: Scale, found: Mapping[str, Target], in_flight: int) -> list[Claim]:
    """Processor time of a request: with a session per connection, and with sessions that change
    connections, of whose requests half move to the other worker.
    """
    ways: tuple[tuple[str, str, SessionUse], ...] = (
        ("one worker, no sessions", OURS, "none"),
        ("two workers, no sessions", TWO, "none"),
        ("one worker, a session per connection", OURS, "kept"),
        ("two workers, a session per connection", TWO, "kept"),
        ("one worker, sessions mixed over connections", OURS, "mixed"),
        ("two workers, sessions mixed over connections", TWO, "mixed"),
    )
    requests = in_flight * scale.pick(tiny=2, quick=50, full=200)
    spent_us: dict[str, list[float]] = {what: [] for what, _, _ in ways}
    for _ in range(scale.pick(tiny=1, quick=3, full=7)):
        for what, name, use in ways:
            processes = family(found[name].pid)
            before_s = sum(map(processor_s, processes))
            run(
                found[name].port,
                SMALL,
                in_flight=in_flight,
                requests=requests,
                headers=TRAIN,
                sessions=use,
            )
            after_s = sum(map(processor_s, processes))
            spent_us[what].append(1e6 * (after_s - before_s) / requests)
    return [
        Claim(what=f"processor time of a request, {what}", value=median(spent), unit="µs")
        for what, spent in spent_us.items()
    ]


def _rounds(
    found: Mapping[str, Target],
    traffic: Traffic,
    *,
    in_flight: int,
    requests: int,
    rounds: int,
    spread_s: float = 0.0,
) -> dict[str, list[Load]]:
    """Every target once per round, in turn; one small warm-up each."""
    loads: dict[str, list[Load]] = {name: [] for name in found}
    for one in found.values():
        run(one.port, traffic, in_flight=in_flight, requests=in_flight, headers=one.headers)
    for _ in range(rounds):
        for name, one in found.items():
            loads[name].append(
                run(
                    one.port,
                    traffic,
                    in_flight=in_flight,
                    requests=requests,
                    headers=one.headers,
                    spread_s=spread_s,
                )
            )
    return loads


def _added_ms(loads: Mapping[str, list[Load]], name: str) -> float:
    pairs = zip(loads[name], loads[ENGINE], strict=True)
    return 1e3 * median(ours.p50_s - engine.p50_s for ours, engine in pairs)


def _latency(name: str, traffic: Traffic, loads: list[Load], target: Target) -> Measurement:
    return Measurement(
        side=f"{name}, {traffic.name}: median request",
        seconds=median(load.p50_s for load in loads),
        peak_bytes=peak_bytes(target.pid),
        rate=1e3 * median(load.p99_s for load in loads),
        rate_unit="ms p99",
    )


ROWS: Final = [Row("proxy_added", measure_added), Row("proxy_saturated", measure_saturated)]
