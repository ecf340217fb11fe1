"""Builds the feed: the one place that makes its socket, tasks and state."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from services.kit.app import ProblemApp, build_app
from services.kit.background import background
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


def create_app(settings: FeedSettings) -> ProblemApp:
    """The application."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        log.info("effective_settings", settings=settings.shown())
        delivery = Delivery(settings.plan())
        events = FeedEvents(delivery, metrics)
        server = FeedServer(delivery, settings.endpoint, keys=settings.keys(), observer=events)
        is_bound = asyncio.Event()
        jobs = [_serve(server, metrics.loop, is_bound)]
        async with background(jobs, crash=made.crash, begun=is_bound):
            app.state.service, app.state.server = FeedService(server), server
            log.info(
                "feed_bound", endpoint=server.bound_endpoint, has_keys=settings.keys() is not None
            )
            yield

    async def ready() -> list[str]:
        return []

    made = build_app(
        name="trainer_feed",
        description=DESCRIPTION,
        settings=settings,
        lifespan=lifespan,
        admin_routers=[router],
        ready=ready,
        registry=registry,
        large_routes=[("PUT", "/v1/steps/")],
    )
    return made


def describe() -> FastAPI:
    """The application with example settings, never started: for its OpenAPI document."""
    return create_app(FeedSettings(run_id="run"))


async def _serve(server: FeedServer, loop: LoopMetrics, is_bound: asyncio.Event) -> None:
    """The server, from bound to closed; an address in use ends the start, with its reason."""
    async with server.serving():
        is_bound.set()
        await watch_loop(loop)
