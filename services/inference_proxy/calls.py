"""Calls one engine for one leg of a request, and tells its health and the metrics how it went."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager

import structlog

from services.inference_proxy.engines import Engine, EngineBook, Role
from services.inference_proxy.headers import to_engine
from services.inference_proxy.metrics import Metrics
from services.inference_proxy.selection import choose
from services.inference_proxy.upstream import Reply, Upstream, UpstreamError
from sideband.ids import SessionId

log = structlog.get_logger(__name__)


class NoEngine(Exception):
    """No engine of a role takes requests."""

    def __init__(self, role: Role) -> None:
        self.role = role
        super().__init__(f"no {role} engine takes requests now")


class EngineCalls:
    """Picks engines and calls them. ``token`` is the engines' own credential."""

    def __init__(
        self, upstream: Upstream, book: EngineBook, *, token: str | None, metrics: Metrics
    ) -> None:
        self._upstream, self._book, self._token = upstream, book, token
        self._metrics = metrics

    def choose(self, role: Role, *, session: SessionId | None, avoid: AbstractSet[str]) -> Engine:
        """The engine that takes a leg. Raises NoEngine."""
        serving = {engine.name: engine for engine in self._book.serving(role)}
        in_flight = {name: engine.in_flight for name, engine in serving.items()}
        name = choose(list(serving), in_flight=in_flight, session=session, avoid=avoid)
        if name is None:
            raise NoEngine(role)
        return serving[name]

    @asynccontextmanager
    async def open(
        self,
        engine: Engine,
        path: str,
        *,
        leg: str,
        content: bytes | None,
        headers: Sequence[tuple[str, str]],
        method: str = "POST",
        reading: Callable[[UpstreamError], Exception] | None = None,
    ) -> AsyncIterator[Reply]:
        """A successful answer, held open. An UpstreamError inside the block counts too.

        ``reading`` may tell that an error is the request's fault and give the one to raise instead;
        the engine is then not blamed.
        """
        started_s = time.monotonic()
        outcome = "cancelled"
        try:
            with self._book.request(engine):
                self._metrics.engine_in_flight.labels(engine.name).set(engine.in_flight)
                async with self._upstream.open(
                    engine.name,
                    f"{engine.url}{path}",
                    method=method,
                    content=content,
                    headers=to_engine(headers, token=self._token),
                ) as reply:
                    yield reply
            self._book.succeeded(engine)
            outcome = "ok"
        except UpstreamError as exc:
            read = exc if reading is None else reading(exc)
            outcome = type(read).__name__
            if read is exc:
                self.failed(engine, exc)
                raise
            raise read from exc
        finally:
            self._metrics.engine_in_flight.labels(engine.name).set(engine.in_flight)
            self._metrics.attempts_total.labels(engine.name, leg, outcome).inc()
            elapsed_s = time.monotonic() - started_s
            self._metrics.attempt_duration_seconds.labels(leg).observe(elapsed_s)

    async def ask(
        self,
        engine: Engine,
        path: str,
        *,
        leg: str,
        content: bytes,
        headers: Sequence[tuple[str, str]],
    ) -> bytes:
        """A whole answer. Raises UpstreamError."""
        async with self.open(engine, path, leg=leg, content=content, headers=headers) as reply:
            return await reply.whole()

    def failed(self, engine: Engine, error: UpstreamError) -> None:
        """Count a failure against an engine's health, if it is the engine's."""
        log.warning("upstream_failed", engine=engine.name, error=error.reason)
        if error.blames_engine and self._book.failed(
            engine, error.reason, now_s=time.monotonic(), is_dead=error.is_dead
        ):
            self._metrics.ejections_total.labels(engine.name).inc()
            log.warning("engine_ejected", engine=engine.name, reason=error.reason)
