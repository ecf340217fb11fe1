"""Calls one engine for one leg of a request, and tells its health and the metrics how it went."""

import time
from collections.abc import Callable, Coroutine, Sequence
from collections.abc import Set as AbstractSet
from types import TracebackType
from typing import Any, Final

import structlog

from services.inference_proxy.asking import Asking
from services.inference_proxy.engine import Engine, Role
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.headers import to_engine
from services.inference_proxy.identity import Misfit, Weights
from services.inference_proxy.metrics import Metrics
from services.inference_proxy.sampled import check_weights
from services.inference_proxy.selection import choose
from services.inference_proxy.upstream import (
    EngineBehind,
    EngineBroke,
    Reply,
    Upstream,
    UpstreamError,
)
from sideband.ids import SessionId

OK: Final = "ok"
CANCELLED: Final = "cancelled"  # or our own fault
CONFIRM_S: Final = 5.0  # to say what it runs

log = structlog.get_logger(__name__)


class NoEngine(Exception):
    """No engine of a role takes requests."""

    def __init__(self, role: Role) -> None:
        self.role = role
        super().__init__(f"no {role} engine takes requests now")


class EngineCalls:
    """Picks engines and calls them. ``token`` is the engines' own credential."""

    def __init__(
        self,
        upstream: Upstream,
        asking: Asking,
        book: EngineBook,
        *,
        token: str | None,
        metrics: Metrics,
    ) -> None:
        self._upstream, self._asking, self._book = upstream, asking, book
        self._token, self._metrics = token, metrics
        self._bare_headers = to_engine((), token=token)

    def choose(self, role: Role, *, session: SessionId | None, avoid: AbstractSet[str]) -> Engine:
        """The engine that takes a leg. Raises NoEngine."""
        found = self._book.serving(role)
        if len(found) == 1:
            return found[0]  # also when it failed before: there is no other
        serving = {engine.name: engine for engine in found}
        in_flight = {name: engine.in_flight for name, engine in serving.items()}
        name = choose(list(serving), in_flight=in_flight, session=session, avoid=avoid)
        if name is None:
            raise NoEngine(role)
        return serving[name]

    def open(
        self,
        engine: Engine,
        path: str,
        *,
        leg: str,
        content: bytes | None,
        headers: Sequence[tuple[str, str]],
        method: str = "POST",
        reading: Callable[[UpstreamError], Exception] | None = None,
    ) -> "OpenCall":
        """A successful answer, held open. An UpstreamError inside the block counts too.

        ``reading`` may tell that an error is the request's fault and give the one to raise instead;
        the engine is then not blamed.
        """
        sending = self._upstream.send(
            engine.name,
            f"{engine.url}{path}",
            method=method,
            content=content,
            headers=to_engine(headers, token=self._token) if headers else self._bare_headers,
        )
        return OpenCall(self, engine, leg, sending, reading)

    def begin(self, engine: Engine) -> None:
        """A request goes there."""
        self._book.begin(engine)

    def end(self, engine: Engine, leg: str, outcome: str, seconds: float) -> None:
        """It came to its end. Success counts for the engine's health."""
        self._book.end(engine)
        if outcome == OK:
            self._book.succeeded(engine)
        self._metrics.attempts_total.add(engine.name, leg, outcome)
        self._metrics.attempt_duration_seconds.observe(leg, seconds=seconds)

    async def check_weights(
        self,
        engine: Engine,
        choices: object,
        *,
        policy_version: int,
        known: Weights,
        process: str | None = None,
    ) -> None:
        """Refuse a whole answer that weights older than its request's sampled.

        One that does not show them is confirmed. ``known`` is what was known of them when the
        request went out, ``process`` the one that the answer names. Raises EngineBehind, and
        UpstreamError when the engine does not say.
        """
        at_least = self._book.least(policy_version)
        try:
            if not check_weights(engine, choices, at_least=at_least, known=known, process=process):
                await self.confirm(engine, policy_version=policy_version, known=known)
        except UpstreamError as exc:
            self.failed(engine, exc, known=known)
            raise

    async def confirm(self, engine: Engine, *, policy_version: int, known: Weights) -> None:
        """Make sure of an answer that does not show its weights: ask the engine what it is now.

        One that was started anew before it answered says it: it is another process, or names no
        weights any more. What nobody reported to this proxy was perhaps said of another process.
        Raises EngineBehind for older weights, UpstreamError.
        """
        at_least = self._book.least(policy_version)
        if engine.at_start >= at_least:
            return
        found = Weights(policy_version=engine.at_start, process=known.process)
        can_tell = engine.identity is not None and engine.names_weights
        if can_tell or (known.is_reported and known.process is not None):
            found = await self._asked(engine, known)
        elif known.is_reported:
            return  # nothing would tell it from one that was started anew
        if found.policy_version < at_least:
            raise EngineBehind(engine.name, weights=found, expected=at_least)

    async def _asked(self, engine: Engine, known: Weights) -> Weights:
        """What it says that it runs now. Raises UpstreamError when it does not say."""
        said = await self._asking.ask(engine, timeout_s=CONFIRM_S)
        if isinstance(said.identity, Misfit):
            raise EngineBroke(engine.name, str(said.identity))
        at_start = Weights(policy_version=engine.at_start, process=said.process)
        if known.are_of_another(said.process):
            return at_start
        named = None if said.identity is None else said.identity.policy_version
        if named is not None:
            return Weights(policy_version=named, is_named=True, process=said.process)
        return at_start if known.process is None else known

    def failed(self, engine: Engine, error: UpstreamError, *, known: Weights) -> None:
        """Count a failure against an engine's health, if it is the engine's."""
        log.warning("upstream_failed", engine=engine.name, error=error.reason)
        if isinstance(error, EngineBehind):
            version = error.weights.policy_version
            log.warning("engine_started_anew", engine=engine.name, policy_version=version)
            self._book.behind(engine, error.weights, known=known)
        if error.blames_engine and self._book.failed(
            engine, error.reason, now_s=time.monotonic(), is_dead=error.is_dead
        ):
            self._metrics.ejections_total.labels(engine.name).inc()
            log.warning("engine_ejected", engine=engine.name, reason=error.reason)


class OpenCall:
    """One call of an engine, as a block: inside it the reply, at its end the outcome is told."""

    __slots__ = (
        "_begun_s",
        "_calls",
        "_engine",
        "_known",
        "_leg",
        "_reading",
        "_reply",
        "_sending",
    )

    def __init__(
        self,
        calls: EngineCalls,
        engine: Engine,
        leg: str,
        sending: Coroutine[Any, Any, Reply],
        reading: Callable[[UpstreamError], Exception] | None,
    ) -> None:
        self._calls, self._engine, self._leg = calls, engine, leg
        self._sending, self._reading = sending, reading
        self._known = engine.weights
        self._reply: Reply | None = None

    async def __aenter__(self) -> Reply:
        self._begun_s = time.monotonic()
        self._calls.begin(self._engine)
        outcome = CANCELLED
        try:
            self._reply = await self._sending
        except UpstreamError as exc:
            read = self._read(exc)
            outcome = type(read).__name__
            if read is exc:
                raise
            raise read from exc
        finally:
            if self._reply is None:
                self._end(outcome)
        return self._reply

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._reply is not None, "the block was entered"
        self._reply.close()
        if not isinstance(error, UpstreamError):
            self._end(OK if error is None else CANCELLED)
            return
        read = self._read(error)
        self._end(type(read).__name__)
        if read is not error:
            raise read from error

    def _read(self, error: UpstreamError) -> Exception:
        read = error if self._reading is None else self._reading(error)
        if read is error:
            self._calls.failed(self._engine, error, known=self._known)
        return read

    def _end(self, outcome: str) -> None:
        self._calls.end(self._engine, self._leg, outcome, time.monotonic() - self._begun_s)
