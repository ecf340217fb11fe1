"""Pure ASGI middleware: request logs and metrics by route template, and a bound on every body."""

import contextlib
import time
from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.kit.bodies import CONTROL_BYTES_MAX
from services.kit.counting import Counts, Durations
from services.kit.logs import REQUEST
from services.kit.problems import BodyTooLarge, render

SECONDS_BUCKETS: Final = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0)
LEFT: Final = 499  # the client left before an answer began


class BodyLimit:
    """Refuses a body over the route's bound: at once when declared, else while it is read.

    That is ``body_bytes_max`` for paths that begin with one of ``large_paths``, else at most
    CONTROL_BYTES_MAX: such a body is parsed on the event loop.
    """

    def __init__(self, app: ASGIApp, *, body_bytes_max: int, large_paths: Sequence[str]) -> None:
        self._app, self._large_paths = app, tuple(large_paths)
        self._large_max, self._small_max = body_bytes_max, min(body_bytes_max, CONTROL_BYTES_MAX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_large = scope["path"].startswith(self._large_paths)
        bytes_max = self._large_max if is_large else self._small_max
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > bytes_max:
            await self._refuse(str(int(declared)), bytes_max, scope, receive, send)
            return
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
            await self._refuse(f"more than {bytes_max}", bytes_max, scope, receive, send)

    async def _refuse(
        self, found: str, bytes_max: int, scope: Scope, receive: Receive, send: Send
    ) -> None:
        problem = BodyTooLarge(
            f"The body has {found} bytes; at most {bytes_max} are taken.",
            bytes_max=bytes_max,
        )
        await render(problem, scope["path"])(scope, receive, send)


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
