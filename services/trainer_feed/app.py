"""Builds the feed: the one place that makes its socket, tasks and state."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from services.kit.app import build_app
from services.kit.loop_watch import LoopMetrics, watch_loop
from services.trainer_feed.config import FeedSettings
from services.trainer_feed.endpoints import router
from services.trainer_feed.events import FeedEvents
from services.trainer_feed.metrics import Metrics
from services.trainer_feed.service import FeedService
from sideband.feed.delivery import Delivery
from sideband.feed.server import FeedServer

DESCRIPTION = (
    "Streams packed micro-batch descriptors to every trainer rank over ZMQ: acknowledged, in "
    "order, once. A step is held until every global rank has committed it."
)

log = structlog.get_logger(__name__)


def create_app(settings: FeedSettings) -> FastAPI:
    """The application."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        log.info("effective_settings", settings=settings.shown())
        delivery = Delivery(settings.plan())
        events = FeedEvents(delivery, metrics)
        server = FeedServer(delivery, settings.endpoint, keys=settings.keys(), observer=events)
        async with _running(server, metrics.loop) as task:
            app.state.service, app.state.server = FeedService(server), server
            app.state.background = task
            log.info(
                "feed_bound", endpoint=server.bound_endpoint, has_keys=settings.keys() is not None
            )
            yield

    async def ready() -> list[str]:
        return ["the feed's socket crashed"] if app.state.background.done() else []

    app = build_app(
        name="trainer_feed",
        description=DESCRIPTION,
        settings=settings,
        lifespan=lifespan,
        admin_routers=[router],
        ready=ready,
        registry=registry,
        large_routes=[("PUT", "/v1/steps/")],
    )
    return app


def describe() -> FastAPI:
    """The application with example settings, never started: for its OpenAPI document."""
    return create_app(FeedSettings(run_id="run"))


@asynccontextmanager
async def _running(server: FeedServer, loop: LoopMetrics) -> AsyncIterator[asyncio.Task[None]]:
    """Owns the server's task from bound to closed. If it crashes, readiness says so."""
    is_bound = asyncio.Event()

    async def run() -> None:
        async with server.serving():
            is_bound.set()
            await watch_loop(loop)

    task = asyncio.create_task(run())
    task.add_done_callback(_say_crash)
    bound = asyncio.create_task(is_bound.wait())
    try:
        await asyncio.wait({task, bound}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()  # an address in use ends the start, with its reason
        yield task
    finally:
        bound.cancel()
        task.cancel()
        await asyncio.gather(task, bound, return_exceptions=True)  # said by the callback


def _say_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("feed_crashed", exc_info=task.exception())
