"""Builds the orchestrator: the one place that makes clients, threads, tasks and state."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import httpx
import structlog
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from services.kit.app import ProblemApp, build_app
from services.kit.background import Crash, background
from services.kit.loop_watch import watch_loop
from services.kit.models import load_model
from services.orchestrator import loops, shipping
from services.orchestrator.beginning import begins_anew
from services.orchestrator.config import OrchestratorSettings
from services.orchestrator.endpoints import admin, leases, rollouts, steps
from services.orchestrator.errors import LedgerUnavailable, NotLeading
from services.orchestrator.feed_client import FeedClient
from services.orchestrator.files import Files
from services.orchestrator.ledger import Ledger
from services.orchestrator.limits import FILE_THREADS
from services.orchestrator.metrics import Metrics
from services.orchestrator.proxy_client import ProxyClient
from services.orchestrator.reading import reader_pool
from services.orchestrator.returning import tell_feed_within
from services.orchestrator.roots import prepare_root, run_root
from services.orchestrator.service import Orchestrator
from services.orchestrator.starting import begin_term
from services.orchestrator.storage.opening import open_ledger
from services.orchestrator.terms import Terms
from sideband.ids import RunId
from sideband.payload.reader import PayloadReader

DESCRIPTION = (
    "Leases rollouts, takes them in when they are done, makes samples and steps of them, hands "
    "the steps to the trainer feed, and deletes payload files when nothing needs them any more."
)
SHUTDOWN_DELETES_S = 5.0  # what is not deleted by then is left to the next process
log = structlog.get_logger(__name__)


def create_app(
    settings: OrchestratorSettings,
    *,
    feed_transport: httpx.AsyncBaseTransport | None = None,
    proxy_transport: httpx.AsyncBaseTransport | None = None,
    ledger: Ledger | None = None,
    clock_s: Callable[[], float] = time.time,
) -> ProblemApp:
    """The application. The transports replace the network, the clock Unix time, for tests.

    ``ledger`` stands for the one of the settings.
    """
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    world = World(ledger=ledger, feed=feed_transport, proxy=proxy_transport, clock_s=clock_s)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        log.info("effective_settings", settings=settings.shown())
        app.state.terms = terms = _terms(settings, metrics, world, made.crash)
        async with terms.running():
            yield
            files = None if terms.problem() else terms.service().files
            if files is not None:
                await files.deleter.settled(timeout_s=SHUTDOWN_DELETES_S)

    async def ready() -> list[str]:
        terms: Terms = made.state.terms
        problem = terms.problem()
        return readiness(terms.service()) if problem is None else [problem.detail]

    made = build_app(
        name="orchestrator",
        description=DESCRIPTION,
        settings=settings,
        lifespan=lifespan,
        admin_routers=[rollouts.admin_router, steps.router, admin.router],
        data_routers=[leases.router, rollouts.router],
        ready=ready,
        registry=registry,
        large_routes=[("POST", "/v1/rollouts")],
    )
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What tests may put in place of the real one."""

    ledger: Ledger | None
    feed: httpx.AsyncBaseTransport | None
    proxy: httpx.AsyncBaseTransport | None
    clock_s: Callable[[], float]


def _terms(settings: OrchestratorSettings, metrics: Metrics, world: World, crash: Crash) -> Terms:
    @asynccontextmanager
    async def open_one() -> AsyncIterator[Ledger]:
        if settings.is_ledger_in_root:
            await asyncio.to_thread(prepare_root, settings)
        opened = world.ledger or await open_ledger(settings.ledger_place(), clock_s=world.clock_s)
        try:
            yield opened
        finally:
            await opened.close()

    @asynccontextmanager
    async def serve(opened: Ledger, is_first: bool) -> AsyncIterator[Orchestrator]:
        async with AsyncExitStack() as stack:
            start = settings.start if is_first else "resume"
            service = await _service(settings, stack, metrics, opened, world.clock_s, start=start)
            service.feed = feed = await _feed(settings, stack, world.feed)
            service.proxy = proxy = await _proxy(settings, stack, world.proxy)
            service.let_out_resumption()
            # Ranks may be started as soon as this is ready. Nothing renews the leadership yet.
            await tell_feed_within(service, settings.ledger_lease_s / 3)
            jobs, gives_up = work(service, feed, proxy), partial(_give_up, service, crash)
            async with background(jobs, crash=gives_up, ends_by=(LedgerUnavailable, NotLeading)):
                yield service

    return Terms(open_one, serve, standby_poll_s=settings.ledger_lease_s / 10, crash=crash)


def describe() -> FastAPI:
    """The application with default settings, never started: for its OpenAPI document."""
    return create_app(OrchestratorSettings())


def readiness(service: Orchestrator) -> list[str]:
    """Why no lease can be given; nothing when one can."""
    reasons = []
    if not service.journal.is_open:
        reasons.append("the ledger is being read")
    if service.book.policy_version is None:
        reasons.append("no policy version is known")
    problem = service.book.run.lease_problem()
    if problem is not None:
        reasons.append(problem.detail)
    return reasons


async def _service(
    settings: OrchestratorSettings,
    stack: AsyncExitStack,
    metrics: Metrics,
    ledger: Ledger,
    clock_s: Callable[[], float],
    *,
    start: Literal["fresh", "resume"],
) -> Orchestrator:
    model = await asyncio.to_thread(load_model, settings.model_config_path)
    records, run_id = await ledger.load(), RunId(settings.run_id)
    is_fresh = begins_anew(records, start=start, start_id=settings.start_id, run_id=run_id)
    if is_fresh:
        await ledger.wipe()  # before the files: what is left of them are orphans, never holes
        records = None
    files = None
    if settings.payload_root is not None:
        # A run that is known has its root: an empty mount point must not become a new one.
        is_known = records is not None
        root = await asyncio.to_thread(run_root, settings, is_fresh=is_fresh, is_known=is_known)
        pool = stack.enter_context(ThreadPoolExecutor(FILE_THREADS, "payload"))
        reader = stack.enter_context(PayloadReader(root, model=model))
        files = Files(root, reader, pool, metrics, deletes_per_s=settings.deletes_per_s)
    resumption = await begin_term(settings, ledger, records, files, now_s=clock_s())
    service = Orchestrator(
        settings,
        resumption=resumption,
        model=model,
        ledger=ledger,
        files=files,
        metrics=metrics,
        readers=await stack.enter_async_context(reader_pool(settings.body_bytes_max)),
        clock_s=clock_s,
    )
    metrics.watch(service.book, lambda: service.journal.pending)
    return service


async def _feed(
    settings: OrchestratorSettings,
    stack: AsyncExitStack,
    transport: httpx.AsyncBaseTransport | None,
) -> FeedClient | None:
    if settings.feed_url is None:
        return None
    http = await stack.enter_async_context(_client(settings, transport))
    return FeedClient(http, url=settings.feed_url, token=_secret(settings.feed_token))


async def _proxy(
    settings: OrchestratorSettings,
    stack: AsyncExitStack,
    transport: httpx.AsyncBaseTransport | None,
) -> ProxyClient | None:
    if settings.proxy_url is None:
        return None
    http = await stack.enter_async_context(_client(settings, transport))
    return ProxyClient(http, url=settings.proxy_url, token=_secret(settings.proxy_token))


def _client(
    settings: OrchestratorSettings, transport: httpx.AsyncBaseTransport | None
) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=transport,
        timeout=settings.http_timeout_s,
        # A server may close an idle connection at any time: short-lived ones rarely meet that.
        limits=httpx.Limits(max_connections=16, keepalive_expiry=2.0),
        trust_env=False,  # no proxy of the environment between the services
    )


def work(
    service: Orchestrator, feed: FeedClient | None, proxy: ProxyClient | None
) -> list[Coroutine[Any, Any, None]]:
    """Every loop that this run needs."""
    jobs = [loops.build_steps(service), loops.keep_time(service), watch_loop(service.metrics.loop)]
    if service.ledger.is_durable:
        jobs.append(loops.keep_leading(service))
    if feed is not None:
        jobs += [shipping.ship_steps(service, feed), shipping.poll_feed(service, feed)]
    if proxy is not None:
        jobs += [loops.poll_proxy(service, proxy), loops.discard_sessions(service, proxy)]
        jobs.append(service.releases.run(proxy))
    else:
        jobs.append(loops.forget_sessions(service))
    if service.files is not None:
        jobs += [loops.sweep_orphans(service), loops.watch_storage(service)]
        jobs.append(service.files.deleter.run())
    return jobs


def _give_up(service: Orchestrator, crash: Crash) -> None:
    """A loop is gone: nothing is decided any more, and the process ends."""
    reason = "a background task crashed; the log has it"
    if service.ledger.is_durable:
        service.journal.give_up(reason)
    else:  # nothing to begin again from: this only refuses what comes until the end
        service.has_crashed = True
        service.book.run = service.book.run.stopped(reason)
    crash()


def _secret(value: SecretStr | None) -> str | None:
    return None if value is None else value.get_secret_value()
