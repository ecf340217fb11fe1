"""A proxy of several workers as real processes, in front of stub engines of the test's own loop."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson

from bench.http.processes import free_port
from services.inference_proxy.workers.places import worker_of
from sideband.ids import RunId
from sideband.payload.root import PayloadRoot
from tests.services.inference_proxy.harness import GENERATE, TRAIN, request_body, served
from tests.services.inference_proxy.stub import StubEngine

ROOT = Path(__file__).parent.parent.parent.parent
RUN = RunId("run-1")
START_TIMEOUT_S = 40.0
PROMPT = [5, 17, 3, 42, 8, 1]


@dataclass(slots=True)
class Workers:
    """The running processes. Every request goes over a connection of its own."""

    process: asyncio.subprocess.Process
    port: int
    count: int
    log: Path

    @property
    def url(self) -> str:
        """Of all workers."""
        return f"http://127.0.0.1:{self.port}"

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request over a new connection, which may arrive at any worker."""
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=30) as http:
            return await http.request(method, path, **options)

    async def generate(self, body: Any, *, session: str | None = None) -> httpx.Response:
        """A train request over a new connection."""
        headers = dict(TRAIN) if session is None else {**TRAIN, "X-Sideband-Session": session}
        return await self.ask("POST", GENERATE, json=body, headers=headers)

    def events(self, name: str) -> list[dict[str, Any]]:
        """What the log says under this name, the earliest first."""
        lines = [
            orjson.loads(line) for line in self.log.read_bytes().splitlines() if line[:1] == b"{"
        ]
        return [line for line in lines if line.get("event") == name]

    def pid(self, worker: int) -> int:
        """Of the worker that started last in this place."""
        started = [
            each["pid"] for each in self.events("worker_started") if each["worker"] == worker
        ]
        return int(started[-1])

    async def ready(self) -> None:
        """Until all are."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                if self.process.returncode is not None:
                    raise RuntimeError(self.log.read_text())
                with contextlib.suppress(httpx.TransportError):
                    if (await self.ask("GET", "/readyz")).status_code == 200:
                        return
                await asyncio.sleep(0.05)


@asynccontextmanager
async def workers(
    engines: dict[str, StubEngine],
    folder: Path,
    *,
    count: int = 2,
    has_root: bool = True,
    main: Sequence[str] = ("-m", "services.inference_proxy"),
    **settings: object,
) -> AsyncIterator[Workers]:
    """``count`` workers. Ended at last, and checked to have ended in order."""
    root = folder / "root" if has_root else None
    if root is not None:
        PayloadRoot.create(root, RUN, fresh=True)
    port, log = free_port(), folder / "proxy.log"
    async with AsyncExitStack() as stack:
        named = []
        for name, engine in engines.items():
            engine.root = root
            url = await stack.enter_async_context(served(engine.app()))
            named.append({"name": name, "url": url, "role": engine.role})
        chosen: dict[str, object] = {
            "port": port,
            "workers": count,
            "engines": orjson.dumps(named).decode(),
            "probe_interval_s": 0.1,
            "delete_grace_s": 0.1,
            **settings,
        }
        if root is not None:
            chosen["payload_root"] = root
        environment = {f"SIDEBAND_PROXY_{key.upper()}": str(value) for key, value in chosen.items()}
        with log.open("w") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *main,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
                cwd=ROOT,
                stderr=output,
            )
        running = Workers(process, port, count, log)
        try:
            await running.ready()
            yield running
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(START_TIMEOUT_S):
                    assert await process.wait() == 0


def session_of(worker: int, count: int = 2, *, number: int = 0) -> str:
    """The name of a session of one worker; another for each ``number``."""
    names = (f"s{each}" for each in range(10_000))
    own = [name for name in names if worker_of(name.encode(), count) == worker]
    return own[number]


def turn(prompt: list[int], name: str, **members: Any) -> dict[str, Any]:
    """The body of a request of this name."""
    return {**request_body(prompt), "request_id": name, **members}


async def rollout(proxy: Workers, session: str, turns: int = 3) -> list[int]:
    """Follow-up turns of one session, each over another connection; the versions of all."""
    prompt = list(PROMPT)
    versions = []
    for number in range(turns):
        answer = await proxy.generate(turn(prompt, f"{session}.t{number}"), session=session)
        assert answer.status_code == 200, answer.text
        versions.append(int(answer.headers["x-sideband-policy-version"]))
        prompt = [*prompt, *answer.json()["choices"][0]["token_ids"], 9]
    return versions


def arrived(engine: StubEngine, count: int) -> bool:
    """Whether so many requests came to it."""
    return len(engine.requests) == count


def starts(engine: StubEngine, session: str) -> list[int]:
    """Where the rows that were asked for a session's turns begin."""
    return [
        body["sampling_params"].get("routed_experts_prompt_start", 0)
        for body in engine.requests
        if body["request_id"].startswith(f"{session}.")
    ]
