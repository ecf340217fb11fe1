"""The HTTP adapter towards engines: httpx in, our own errors out, every wait under a deadline.

::

    UpstreamError              engine, reason; is_retryable; blames_engine
    ├── EngineUnreachable      nothing listens there
    ├── EngineTimeout          it was silent for too long
    ├── EngineBroke            a torn answer, a 5xx, or something that is no answer
    ├── EngineBusy             it, or our own pool, takes no more for now
    └── EngineRefused          a 4xx: the request is at fault; never retried

Cancelling a call closes its connection, which makes the engine abort the request.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from services.inference_proxy.limits import ANSWER_BYTES_MAX, ERROR_BYTES_MAX


class UpstreamError(Exception):
    """An engine gave no answer. No token of it has reached the client."""

    is_retryable = True
    blames_engine = True
    is_dead = False

    def __init__(self, engine: str, reason: str) -> None:
        self.engine, self.reason = engine, reason
        super().__init__(f"engine {engine}: {reason}")


class EngineUnreachable(UpstreamError):
    """Nothing listens there."""

    is_dead = True


class EngineTimeout(UpstreamError):
    """It was silent for longer than a deadline allows."""


class EngineBroke(UpstreamError):
    """A torn answer, a server error, or something that is no answer."""

    def __init__(self, engine: str, reason: str, *, status: int = 0, error: object = None) -> None:
        self.status, self.error = status, error
        super().__init__(engine, reason)


class EngineBusy(UpstreamError):
    """It, or our own pool, takes no more for now."""

    blames_engine = False


class EngineRefused(UpstreamError):
    """The engine says that the request is at fault."""

    is_retryable = False
    blames_engine = False

    def __init__(self, engine: str, *, status: int, content: bytes, content_type: str) -> None:
        self.status, self.content, self.content_type = status, content, content_type
        super().__init__(engine, f"status {status}: {error_text(parsed(content))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The head of an engine's successful answer; its body is read through ``chunks``."""

    engine: str
    status: int
    headers: list[tuple[str, str]]
    content_type: str
    response: httpx.Response

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, at most ANSWER_BYTES_MAX. Raises UpstreamError."""
        read_bytes = 0
        try:
            async for chunk in self.response.aiter_bytes():
                read_bytes += len(chunk)
                if read_bytes > ANSWER_BYTES_MAX:
                    raise EngineBroke(self.engine, f"sends more than {ANSWER_BYTES_MAX} bytes")
                yield chunk
        except httpx.HTTPError as exc:
            raise translate(self.engine, exc) from exc

    async def whole(self) -> bytes:
        """The whole body. Raises UpstreamError."""
        return b"".join([chunk async for chunk in self.chunks()])


class Upstream:
    """Calls engines. Knows only the URLs that it is given; follows no redirect."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    @asynccontextmanager
    async def open(
        self,
        engine: str,
        url: str,
        *,
        method: str = "POST",
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Reply]:
        """Send a request and hold its answer open; leaving the block closes the connection.

        Raises UpstreamError for every answer that is not a 2xx.
        """
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
        request = self._client.build_request(
            method, url, content=content, headers=dict(headers or {}), timeout=timeout
        )
        try:
            response = await self._client.send(request, stream=True, follow_redirects=False)
        except httpx.HTTPError as exc:
            raise translate(engine, exc) from exc
        try:
            content_type = response.headers.get("content-type", "application/json")
            if not response.is_success:
                raise await _failure(engine, response, content_type)
            yield Reply(
                engine=engine,
                status=response.status_code,
                headers=list(response.headers.items()),
                content_type=content_type,
                response=response,
            )
        finally:
            await response.aclose()


async def _failure(engine: str, response: httpx.Response, content_type: str) -> UpstreamError:
    """The error that a bad status stands for."""
    content = b""
    try:
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > ERROR_BYTES_MAX:
                break
    except httpx.HTTPError as exc:
        return translate(engine, exc)
    status, content = response.status_code, content[:ERROR_BYTES_MAX]
    if status == 429:
        return EngineBusy(engine, "status 429")
    if 400 <= status < 500:
        return EngineRefused(engine, status=status, content=content, content_type=content_type)
    error = parsed(content)
    reason = f"status {status}: {error_text(error)}"
    return EngineBroke(engine, reason, status=status, error=error)


def translate(engine: str, error: httpx.HTTPError) -> UpstreamError:
    """Our error for one of httpx, the most specific first."""
    named = f"{type(error).__name__}: {error}"[:500]
    if isinstance(error, httpx.PoolTimeout):
        return EngineBusy(engine, "no free connection in time")
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return EngineUnreachable(engine, named)
    if isinstance(error, httpx.TimeoutException):
        return EngineTimeout(engine, named)
    return EngineBroke(engine, named)


def parsed(content: bytes) -> Any:
    """JSON, or None when it is none."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return None


def error_text(error: object) -> str:
    """What an engine's error body says, shortened."""
    if not isinstance(error, dict):
        return "no reason given"
    inner = error.get("error", error)
    inner = inner if isinstance(inner, dict) else {"message": inner}
    said = inner.get("message") or inner.get("detail") or inner.get("type") or "no reason given"
    return str(said)[:500]
