"""Builds the proxy: the one place that makes clients, threads, tasks and state."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import structlog
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from services.inference_proxy.admission import Gate
from services.inference_proxy.asking import Asking
from services.inference_proxy.attempts import Attempts
from services.inference_proxy.budget import ByteBudget
from services.inference_proxy.building import build_book, version_settled
from services.inference_proxy.calls import EngineCalls
from services.inference_proxy.config import ProxySettings
from services.inference_proxy.endpoints import admin, generate, openai, turns, weights
from services.inference_proxy.endpoints.parts import Parts
from services.inference_proxy.endpoints.plain import PlainRequests
from services.inference_proxy.engine import Engine
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.janitor import Janitor
from services.inference_proxy.keeping import Keeper
from services.inference_proxy.kept import KeptTurns
from services.inference_proxy.metrics import Metrics
from services.inference_proxy.openai import OpenAIService
from services.inference_proxy.openai_turns import OpenAITurns
from services.inference_proxy.payloads import RootHandle
from services.inference_proxy.probes import Probes
from services.inference_proxy.readiness import readiness
from services.inference_proxy.retries import RetryLimits
from services.inference_proxy.service import GenerateService
from services.inference_proxy.sessions import SessionBook
from services.inference_proxy.siblings import Alone, Siblings
from services.inference_proxy.spill import Spill
from services.inference_proxy.turn_source import OwnTurns
from services.inference_proxy.upstream import Upstream, Wire
from services.inference_proxy.versions import VersionPusher
from services.inference_proxy.weights import WeightUpdates
from services.inference_proxy.wire import open_wire
from services.inference_proxy.workers.errors import Misdirected
from services.inference_proxy.workers.state import FollowingBook
from services.inference_proxy.workers.team import Member, Team
from services.kit.app import ProblemApp, build_app
from services.kit.auth import TokenCheck
from services.kit.background import background
from services.kit.models import load_model
from sideband.compiled import compile_loops
from sideband.model import ModelShape
from sideband.payload.encodings import Encodings

DESCRIPTION = (
    "Forwards inference requests to engines: rows of train requests go by handle, prefill and "
    "decode answers are merged, sessions keep their engine and their policy version."
)
PAYLOAD_THREADS = 2  # deletes and marker reads; a slow filesystem must not take other threads

log = structlog.get_logger(__name__)


def create_app(
    settings: ProxySettings, *, wire: Wire | None = None, member: Member | None = None
) -> ProblemApp:
    """The application. ``wire`` replaces the network towards engines, for tests. With a ``member``
    it is one of several workers.
    """
    registry = CollectorRegistry()
    metrics = Metrics(registry)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        log.info("effective_settings", settings=settings.shown())
        async with open_wire(settings) if wire is None else nullcontext(wire) as opened:
            with (
                ThreadPoolExecutor(PAYLOAD_THREADS, "payload") as executor,
                ThreadPoolExecutor(settings.share().spill_threads, "spill") as writers,
            ):
                model = await asyncio.to_thread(load_model, settings.model_config_path)
                if settings.spills:  # later, it would keep Python's lock from requests
                    await asyncio.to_thread(compile_loops)
                parts = build_parts(
                    settings.share(), opened, executor, writers, metrics, model, member
                )
                app.state.parts = parts
                await asyncio.to_thread(parts.root.refresh)
                async with background(jobs_of(parts), crash=made.crash):
                    yield
                await parts.janitor.finish()

    async def ready() -> list[str]:
        parts = made.state.parts
        return [*readiness(parts), *await parts.siblings.not_ready()]

    async def scrape(own: bytes) -> bytes:
        scraped: bytes = await made.state.parts.siblings.scraped(own)
        return scraped

    made = build_app(
        name="inference_proxy",
        description=DESCRIPTION,
        settings=settings,
        lifespan=lifespan,
        admin_routers=[admin.router, weights.router],
        data_routers=[generate.router, openai.router, turns.router],
        ready=ready,
        registry=registry,
        large_routes=[("POST", path) for path in (generate.PATH, *openai.PATHS)],
        scrape=scrape,
        unrouted=[Misdirected],
    )
    made.state.registry = registry
    documented = next(r for r in generate.router.routes if getattr(r, "path", "") == generate.PATH)
    made.shortcut = PlainRequests(
        made,
        documented,
        TokenCheck(made.tokens, "data"),
        body_bytes_max=settings.body_bytes_max,
    )
    return made


def describe() -> FastAPI:
    """The application with default settings, never started: for its OpenAPI document."""
    return create_app(ProxySettings())


def reasons_not_ready(app: ProblemApp) -> list[str]:
    """Why this process cannot serve requests; nothing when it can."""
    return [*app.crash.reasons, *readiness(app.state.parts)]


def build_parts(
    settings: ProxySettings,
    wire: Wire,
    executor: ThreadPoolExecutor,
    writers: ThreadPoolExecutor,
    metrics: Metrics,
    model: ModelShape | None,
    member: Member | None,
) -> Parts:
    """Everything that a running proxy consists of, wired."""
    root, gate = RootHandle(settings.payload_root, run_id=settings.run_id), Gate()
    leads = member is None or member.is_leader
    book = build_book(settings, model, EngineBook if leads else FollowingBook)
    settled = version_settled(settings)
    siblings = Alone() if member is None else Team(member, book, gate, settled)
    sessions = SessionBook(
        sessions_max=settings.sessions_max, tokens_max=settings.session_tokens_max
    )
    _show(metrics, book, sessions)
    upstream, engine_token = Upstream(wire), _secret(settings.engine_token)
    asking = Asking(upstream, token=engine_token)
    calls = EngineCalls(upstream, asking, book, token=engine_token, metrics=metrics)
    janitor = Janitor(root, grace_s=settings.delete_grace_s, metrics=metrics, executor=executor)
    retries = RetryLimits(attempts_max=settings.attempts_max, wait_s_max=settings.retry_wait_s_max)
    spill = None if model is None else _spill(settings, root, model, writers, metrics)
    keeper = _keeper(settings, metrics)
    own_turns = OwnTurns(keeper.turns)
    attempts = Attempts(calls, janitor, spill, is_pair=book.is_pair)
    pusher = _pusher(settings, upstream, book, siblings, settled, metrics, leads=leads)
    generate = GenerateService(
        attempts, book, sessions, root, gate, spill, keeper, retries=retries, metrics=metrics
    )
    return Parts(
        settings=settings,
        book=book,
        sessions=sessions,
        root=root,
        gate=gate,
        janitor=janitor,
        asking=asking,
        probes=_probes(settings, upstream, asking, book, root, metrics, executor, settled),
        pusher=pusher,
        keeper=keeper,
        kept=own_turns if member is None else member.turns(own_turns),
        siblings=siblings,
        weights=WeightUpdates(
            upstream,
            asking,
            book,
            siblings,
            token=engine_token,
            timeout_s=settings.weights_timeout_s,
        ),
        generate=generate,
        turns=OpenAITurns(calls, book, janitor, spill, generate, retries=retries),
        openai=OpenAIService(calls, book, gate, retries=retries),
        metrics=metrics,
    )


def _probes(
    settings: ProxySettings,
    upstream: Upstream,
    asking: Asking,
    book: EngineBook,
    root: RootHandle,
    metrics: Metrics,
    executor: ThreadPoolExecutor,
    settled: asyncio.Event,
) -> Probes:
    return Probes(
        upstream,
        asking,
        book,
        root,
        interval_s=settings.probe_interval_s,
        timeout_s=settings.probe_timeout_s,
        token=_secret(settings.engine_token),
        metrics=metrics,
        executor=executor,
        settled=settled,
    )


def _pusher(
    settings: ProxySettings,
    upstream: Upstream,
    book: EngineBook,
    siblings: Siblings,
    settled: asyncio.Event,
    metrics: Metrics,
    *,
    leads: bool,
) -> VersionPusher:
    return VersionPusher(
        upstream,
        book,
        siblings,
        settled,
        url=settings.orchestrator_url if leads else None,
        token=_secret(settings.orchestrator_token),
        timeout_s=settings.push_timeout_s,
        metrics=metrics,
    )


def _spill(
    settings: ProxySettings,
    root: RootHandle,
    model: ModelShape,
    writers: ThreadPoolExecutor,
    metrics: Metrics,
) -> Spill:
    budget = ByteBudget(settings.spill_bytes_max)
    metrics.spill.held_bytes.set_function(lambda: budget.held_bytes)
    return Spill(
        root,
        model,
        encodings=Encodings(routing=settings.routing_encoding),
        executor=writers,
        budget=budget,
        metrics=metrics,
    )


def _keeper(settings: ProxySettings, metrics: Metrics) -> Keeper:
    kept = KeptTurns(
        turns_max=settings.kept_turns_max,
        bytes_max=settings.kept_bytes_max,
        age_s_max=settings.kept_age_s_max,
        clock_s=time.monotonic,
    )
    metrics.kept.turns.set_function(lambda: len(kept))
    metrics.kept.bytes.set_function(lambda: kept.size_bytes)
    return Keeper(kept, run_id=settings.run_id, clock_s=time.monotonic)


def jobs_of(parts: Parts) -> list[Coroutine[Any, Any, None]]:
    """The proxy's background work."""
    return [
        parts.probes.run(),
        parts.janitor.run(),
        parts.pusher.run(),
        parts.keeper.run(),
        parts.siblings.run(),
    ]


def _show(metrics: Metrics, book: EngineBook, sessions: SessionBook) -> None:
    """What a scrape reads from the state as it is."""
    metrics.sessions.set_function(lambda: len(sessions))
    metrics.session_tokens.set_function(lambda: sessions.tokens)
    for engine in book:
        metrics.engine_in_flight.labels(engine.name).set_function(partial(_in_flight, engine))


def _in_flight(engine: Engine) -> float:
    return engine.in_flight


def _secret(value: SecretStr | None) -> str | None:
    return None if value is None else value.get_secret_value()
