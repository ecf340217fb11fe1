"""Builds the FastAPI application of a service: the routes that all have, errors, limits, metrics.

A service's ``app.py`` creates its clients, queues and tasks in a lifespan and calls ``build_app``.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import metadata
from typing import Any, Protocol

from fastapi import APIRouter, Depends, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Receive, Scope, Send

from services.kit import problems
from services.kit.auth import TokenCheck, Tokens
from services.kit.background import Crash, background
from services.kit.middleware import BodyLimit, RequestLog, RequestMetrics
from services.kit.problems import (
    UNROUTED,
    Forbidden,
    Problem,
    Unauthorized,
    contained,
    described,
    responses,
)
from services.kit.server import WholeSend, protocol_of
from services.kit.settings import ServiceSettings

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
ReadyCheck = Callable[[], Awaitable[list[str]]]
Scrape = Callable[[bytes], Awaitable[bytes]]


class NotReady(Problem):
    """The service runs but cannot do its work yet; ``reasons`` says why."""

    status, code, title = 503, "not_ready", "Not ready"


class Health(BaseModel):
    """The process answers."""

    status: str = Field(description="Always ok.", examples=["ok"])


class Version(BaseModel):
    """What runs."""

    service: str = Field(description="Name of the service.", examples=["orchestrator"])
    version: str = Field(description="Version of Sideband.", examples=["0.1.0"])
    python: str = Field(description="Version of Python.", examples=["3.11.7"])


class Config(BaseModel):
    """Effective settings; secrets are stars."""

    settings: dict[str, Any] = Field(
        description="Each setting and its value.", examples=[{"port": 8200}]
    )


class Shortcut(Protocol):
    """Answers without the framework what is plainly right; all else goes the documented way."""

    @property
    def path(self) -> str:
        """Of the requests that may be plain."""

    async def read(self, scope: Scope, receive: Receive) -> tuple[ASGIApp | None, Receive]:
        """What answers the request, or None; and ``receive`` as it was before anything was read."""


class ProblemApp(FastAPI):
    """FastAPI whose document shows errors in the one form that is sent.

    A ``shortcut`` is asked first; ``log`` then sees its requests as the middleware sees others.
    """

    shortcut: Shortcut | None = None
    log: RequestLog
    tokens: Tokens
    crash: Crash

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the lifespan."""
        shortcut, protocol = self.shortcut, protocol_of(scope)
        if protocol is not None:
            send = WholeSend(protocol, scope, send)
        if shortcut is None or scope["type"] != "http" or scope["path"] != shortcut.path:
            await super().__call__(scope, receive, send)
            return
        begun_s = time.monotonic()
        answering, receive = await shortcut.read(scope, receive)
        if answering is None:
            await super().__call__(scope, receive, send)
        else:
            await self.log.watched(contained(answering), scope, receive, send, begun_s=begun_s)

    def openapi(self) -> dict[str, Any]:
        """The document; made once."""
        if self.openapi_schema is None:
            self.openapi_schema = problems.only_problems(super().openapi())
        return self.openapi_schema


def build_app(
    *,
    name: str,
    description: str,
    settings: ServiceSettings,
    lifespan: Lifespan,
    admin_routers: Sequence[APIRouter],
    ready: ReadyCheck,
    registry: CollectorRegistry,
    data_routers: Sequence[APIRouter] = (),
    large_routes: Sequence[tuple[str, str]] = (),
    scrape: Scrape | None = None,
    unrouted: Sequence[type[Problem]] = (),
) -> ProblemApp:
    """The application. ``ready`` returns why the service cannot work yet; nothing means ready.
    ``scrape`` adds what other processes count to the metrics of this one. ``unrouted`` are further
    problems that any request may meet before its route is known.

    ``data_routers`` hold what environments use: data tokens open them too. Bodies of
    ``large_routes`` may have ``body_bytes_max``; see ``BodyLimit``.
    """
    tokens = Tokens(
        admin=settings.admin_tokens, data=settings.data_tokens, file=settings.tokens_file
    )
    crash = Crash()
    app = ProblemApp(
        title=f"Sideband {name.replace('_', ' ')}",
        description=description,
        version=metadata.version("sideband"),
        lifespan=_with_tokens(lifespan, tokens, crash),
        responses=described(*UNROUTED, *unrouted),
    )
    app.tokens, app.crash = tokens, crash
    problems.install(app)
    # The last one added is the outermost: the log sees what the limit refuses.
    app.add_middleware(BodyLimit, body_bytes_max=settings.body_bytes_max, large_routes=large_routes)
    metrics = RequestMetrics(registry)
    app.add_middleware(RequestLog, metrics=metrics)
    app.log = RequestLog(app, metrics=metrics)
    app.include_router(_common(name, crash, ready, registry, scrape))
    admin, data = Depends(TokenCheck(tokens, "admin")), Depends(TokenCheck(tokens, "data"))
    for router in (_config(settings), *admin_routers):
        refusals = responses(Unauthorized, Forbidden)
        app.include_router(router, dependencies=[admin], responses=refusals)
    for router in data_routers:
        app.include_router(router, dependencies=[data], responses=responses(Unauthorized))
    return app


def _with_tokens(lifespan: Lifespan, tokens: Tokens, crash: Crash) -> Lifespan:
    """The file of tokens is read at the start, which a bad one fails, and watched to the end."""

    @asynccontextmanager
    async def watched(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(tokens.reload)
        jobs = [tokens.watch()] if tokens.is_in_file else []
        async with background(jobs, crash=crash), lifespan(app):
            yield

    return watched


def _common(
    name: str,
    crash: Crash,
    ready: ReadyCheck,
    registry: CollectorRegistry,
    scrape: Scrape | None,
) -> APIRouter:
    router = APIRouter(tags=["service"])

    @router.get("/healthz", summary="Is the process alive?")
    async def health() -> Health:
        return Health(status="ok")

    @router.get("/readyz", summary="Can it do its work?", responses=responses(NotReady))
    async def readiness() -> Health:
        reasons = [*crash.reasons, *await ready()]
        if reasons:
            raise NotReady("; ".join(reasons), reasons=reasons, headers={"Retry-After": "1"})
        return Health(status="ok")

    @router.get("/version", summary="What runs here?")
    async def version() -> Version:
        python = ".".join(str(part) for part in sys.version_info[:3])
        return Version(service=name, version=metadata.version("sideband"), python=python)

    @router.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def metrics() -> Response:
        content = generate_latest(registry)
        if scrape is not None:
            content = await scrape(content)
        return Response(content, media_type=CONTENT_TYPE_LATEST)

    return router


def _config(settings: ServiceSettings) -> APIRouter:
    router = APIRouter(tags=["service"])

    @router.get("/v1/config", summary="Effective settings, secrets hidden")
    async def config() -> Config:
        return Config(settings=settings.shown())

    return router
