"""Pure ASGI middleware: request logs and metrics by route template, and a bound on every body."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.kit.bodies import CONTROL_BYTES_MAX, CONTROL_S_MAX
from services.kit.counting import Counts, Durations
from services.kit.logs import REQUEST
from services.kit.problems import BodyLate, BodyTooLarge, Problem, render
from services.kit.reading import read_body, replayed

SECONDS_BUCKETS: Final = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0)
LEFT: Final = 499  # the client left before an answer began


class BodyLimit:
    """Nothing is done for a request whose body is broken, cut or too large.

    A body is read whole before the application sees its request, whether the route reads it or not,
    and has at most CONTROL_BYTES_MAX: it is parsed on the event loop. Only ``large_routes``, each a
    method and a path (one that ends with ``/`` stands for all below), read a body of up to
    ``body_bytes_max`` themselves, to its end, before they act.
    """

    def __init__(
        self, app: ASGIApp, *, body_bytes_max: int, large_routes: Sequence[tuple[str, str]]
    ) -> None:
        self._app, self._large_routes = app, tuple(large_routes)
        self._large_max, self._small_max = body_bytes_max, min(body_bytes_max, CONTROL_BYTES_MAX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_large = self._is_large(scope)
        bytes_max = self._large_max if is_large else self._small_max
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > bytes_max:
            await render(_too_large(str(int(declared)), bytes_max), scope["path"])(
                scope, receive, send
            )
        elif is_large:
            await self._bounded(bytes_max, scope, receive, send)
        elif b"transfer-encoding" in headers or declared.strip(b"0"):
            await self._whole(bytes_max, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_large(self, scope: Scope) -> bool:
        return any(
            scope["method"] == method
            and (scope["path"].startswith(path) if path.endswith("/") else scope["path"] == path)
            for method, path in self._large_routes
        )

    async def _whole(self, bytes_max: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then let the application answer."""
        problem: Problem
        try:
            async with asyncio.timeout(CONTROL_S_MAX):
                messages, body = await read_body(receive, bytes_max=bytes_max)
        except TimeoutError:
            detail = f"The body did not come within {CONTROL_S_MAX:g} s."
            problem = BodyLate(detail, headers={"Connection": "close"})
        else:
            if body is not None:
                await self._app(scope, replayed(messages, receive), send)
                return
            if messages[-1]["type"] != "http.request":
                return  # cut, or not as HTTP says, which the server has told
            problem = _too_large(f"more than {bytes_max}", bytes_max)
        await render(problem, scope["path"])(scope, receive, send)

    async def _bounded(self, bytes_max: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application read the body, as far as it may be large."""
        read_bytes, has_started = 0, False

        async def bounded() -> Message:
            nonlocal read_bytes
            message = await receive()
            read_bytes += len(message.get("body", b""))
            if read_bytes > bytes_max:
                raise _TooMuch
            return message

        async def guarded(message: Message) -> None:
            # Frameworks turn an error while a body is read into a 400 of their own: ours stands.
            nonlocal has_started
            if read_bytes <= bytes_max or has_started:
                has_started = True
                await send(message)

        with contextlib.suppress(_TooMuch):  # answered below
            await self._app(scope, bounded, guarded)
        if read_bytes > bytes_max and not has_started:
            problem = _too_large(f"more than {bytes_max}", bytes_max)
            await render(problem, scope["path"])(scope, receive, send)


def _too_large(found: str, bytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The body has {found} bytes; at most {bytes_max} are taken.", bytes_max=bytes_max
    )


class _TooMuch(Exception):
    """Ends the reading of a body; never leaves this module."""


class RequestMetrics:
    """Count and duration of requests, labelled by method, route template and status."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("method", "route", "status")
        self.requests_total = Counts(
            "http_requests_total", "Requests answered.", labels, registry=registry
        )
        self.request_duration_seconds = Durations(
            "http_request_duration_seconds",
            "Time until the answer was sent.",
            labels[:2],
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )

    def count(self, scope: Scope, status: int, seconds: float) -> None:
        """Count one request that has ended."""
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"]
        self.requests_total.add(method, route, str(status))
        self.request_duration_seconds.observe(method, route, seconds=seconds)


class RequestLog:
    """Names method and path in the log of each request, and counts it when it ends."""

    def __init__(self, app: ASGIApp, *, metrics: RequestMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.watched(self._app, scope, receive, send, begun_s=time.monotonic())
        else:
            await self._app(scope, receive, send)

    async def watched(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, begun_s: float
    ) -> None:
        """Let ``app`` answer a request that began at ``begun_s``."""
        status = LEFT

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = REQUEST.set((scope["method"], scope["path"]))
        try:
            await app(scope, receive, noted)
        finally:
            REQUEST.reset(token)
            self._metrics.count(scope, status, time.monotonic() - begun_s)
