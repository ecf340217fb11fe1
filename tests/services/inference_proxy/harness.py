"""Runs engines and the proxy on loopback inside the test's own loop."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from services.inference_proxy.app import create_app
from services.inference_proxy.config import EngineSettings, ProxySettings
from services.inference_proxy.endpoints.parts import Parts
from services.inference_proxy.upstream import EngineUnreachable
from services.kit.app import ProblemApp
from services.kit.server import CallerProtocol
from sideband.ids import RunId
from sideband.payload.root import PayloadRoot
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import HF_CONFIG

RUN = RunId("run-1")
TRAIN = {"X-Sideband-Kind": "train"}
GENERATE = "/inference/v1/generate"


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """``app`` behind a real server; its base URL."""
    config = uvicorn.Config(
        app,
        http=CallerProtocol,
        log_level="critical",
        lifespan="on",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await until(lambda: server.started or task.done())
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def until(holds: Callable[[], Any], *, timeout_s: float = 5.0) -> None:
    """Wait until ``holds()``; a TimeoutError names what never did."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - state of any kind is polled
            await asyncio.sleep(0.005)


@dataclass(slots=True)
class Running:
    """A proxy in front of stub engines."""

    http: httpx.AsyncClient
    parts: Parts
    engines: dict[str, StubEngine]
    root: Path | None
    app: ProblemApp

    async def generate(self, body: Any, **headers: str) -> httpx.Response:
        """Post a train request; keyword ``session`` and ``version`` become headers."""
        named = {"session": "X-Sideband-Session", "version": "X-Sideband-Policy-Version"}
        sent = {named[name]: value for name, value in headers.items()}
        return await self.http.post(GENERATE, json=body, headers={**TRAIN, **sent})

    def files(self) -> list[str]:
        """Payload files under the root."""
        assert self.root is not None
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*.sbp"))


def served_proxy(proxy: "Running") -> AbstractAsyncContextManager[str]:
    """The running proxy behind a real server."""
    return served_started(proxy.app)


def served_started(app: ASGIApp) -> AbstractAsyncContextManager[str]:
    """An application behind a real server; its lifespan was entered already."""
    bare = FastAPI()

    async def forward(scope: Scope, receive: Receive, send: Send) -> None:
        await (bare if scope["type"] == "lifespan" else app)(scope, receive, send)

    return served(forward)


class WholeAnswer:
    """An answer that came whole."""

    def __init__(self, answer: httpx.Response, content: bytes) -> None:
        self.status, self.headers = answer.status_code, list(answer.headers.items())
        self.content_type = answer.headers.get("content-type", "application/json")
        self._rest = content

    async def read(self) -> bytes:
        """All of it, then nothing."""
        part, self._rest = self._rest, b""
        return part

    def close(self) -> None:
        """Nothing is held."""


class InProcess:
    """A wire without sockets, to engines by host name: answers come whole, nothing can hang."""

    def __init__(self, engines: dict[str, StubEngine]) -> None:
        self._hosts = {
            name: httpx.ASGITransport(engine.app(), raise_app_exceptions=False)
            for name, engine in engines.items()
        }

    async def send(
        self,
        engine: str,
        url: str,
        *,
        method: str,
        content: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float | None,
    ) -> WholeAnswer:
        """The answer of the engine that the URL names; any other host is a failed test."""
        request = httpx.Request(method, url, content=content, headers=dict(headers))
        if request.url.host not in self._hosts:
            raise EngineUnreachable(engine, f"nothing listens at {request.url.host}")
        async with asyncio.timeout(timeout_s):
            answer = await self._hosts[request.url.host].handle_async_request(request)
            return WholeAnswer(answer, await answer.aread())


@asynccontextmanager
async def running(
    engines: dict[str, StubEngine],
    *,
    root: Path | None = None,
    payload_root_later: Path | None = None,
    has_sockets: bool = False,
    waits: bool = True,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A proxy, called in process; so are its engines, or served for real when ``has_sockets``.

    With ``waits`` every engine serves.
    """
    options: dict[str, Any] = {
        "probe_interval_s": 0.05,
        "probe_timeout_s": 1.0,
        "ejection_backoff_s": 0.0,
        "return_probes": 1,
        "retry_wait_s_max": 0.01,
        "delete_grace_s": 0.2,
        "connect_timeout_s": 1.0,
        **settings,
    }
    if root is not None:
        PayloadRoot.create(root, RUN, fresh=True)
        if any(engine.spills for engine in engines.values()) and "model_config_path" not in options:
            options["model_config_path"] = root.with_name("model.json")
            options["model_config_path"].write_text(json.dumps(HF_CONFIG))
    async with AsyncExitStack() as stack:
        configured = []
        for name, engine in engines.items():
            engine.root = root
            url = f"http://{name}"
            if has_sockets:
                url = await stack.enter_async_context(served(engine.app()))
            role: Any = engine.role
            spill: Any = "proxy" if engine.spills else "engine"
            configured.append(
                EngineSettings(name=name, url=url, role=role, spill=spill, dialect=engine.dialect)
            )
        app = create_app(
            ProxySettings(
                engines=tuple(configured), payload_root=root or payload_root_later, **options
            ),
            wire=None if has_sockets else InProcess(engines),
        )
        await stack.enter_async_context(app.router.lifespan_context(app))
        parts: Parts = app.state.parts
        if waits:
            await until(lambda: not parts.book.missing_roles())
            await until(lambda: all(e.health.state == "healthy" for e in parts.book))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        http = httpx.AsyncClient(transport=transport, base_url="http://proxy", timeout=10)
        yield Running(await stack.enter_async_context(http), parts, engines, root, app)


def pair(*, spills: bool = False) -> dict[str, StubEngine]:
    """One prefill and one decode engine."""
    return {
        "p0": StubEngine("prefill", spills=spills),
        "d0": StubEngine("decode", spills=spills),
    }


def request_body(prompt: list[int], max_tokens: int = 4, **params: Any) -> dict[str, Any]:
    """A token-in/token-out body."""
    sampling = {"max_tokens": max_tokens, "temperature": 1.0, "top_k": 20, **params}
    return {"token_ids": prompt, "sampling_params": sampling, "request_id": "r1"}
