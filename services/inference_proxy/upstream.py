"""Calls of engines: what an answer is, and our own error for everything that is none.

::

    UpstreamError              engine, reason; is_retryable; blames_engine
    ├── EngineUnreachable      nothing listens there
    ├── EngineTimeout          it was silent for too long
    ├── EngineBroke            a torn answer, a 5xx, or something that is no answer
    ├── EngineBusy             it, or our own pool, takes no more for now
    ├── EngineBehind           older weights than it was taken to run sampled the answer
    └── EngineRefused          a 4xx: the request is at fault; never retried

The bytes travel by a ``Wire`` (``wire.py`` has the one over TCP). Cancelling a call closes its
connection, which makes the engine abort the request.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import orjson
from msgspec import Struct

from services.inference_proxy.identity import Weights
from services.inference_proxy.limits import ANSWER_BYTES_MAX, ERROR_BYTES_MAX
from services.inference_proxy.nesting import is_too_deep


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


class EngineBehind(UpstreamError):
    """Older weights than it was taken to run sampled the answer: it was started anew, unseen."""

    blames_engine = False  # its health is well; what it runs is known now, and keeps it out

    def __init__(self, engine: str, *, weights: Weights, expected: int) -> None:
        """``weights`` are those that it is known to run by its answer."""
        self.weights, self.expected = weights, expected
        found = f"v{weights.policy_version}"
        super().__init__(engine, f"{found} sampled the answer to a request of v{expected}")


class EngineRefused(UpstreamError):
    """The engine says that the request is at fault."""

    is_retryable = False
    blames_engine = False

    def __init__(self, engine: str, *, status: int, content: bytes, content_type: str) -> None:
        self.status, self.content, self.content_type = status, content, content_type
        super().__init__(engine, f"status {status}: {error_text(parsed(content))}")


class WireAnswer(Protocol):
    """The head of an answer, of any status; its body is read part by part."""

    @property
    def status(self) -> int: ...

    @property
    def content_type(self) -> str: ...

    @property
    def headers(self) -> list[tuple[str, str]]: ...

    async def read(self) -> bytes:
        """The next part of the body, empty at its end. Raises UpstreamError."""

    def close(self) -> None:
        """Give the connection back; an answer that was not read to its end is cut off."""


class Wire(Protocol):
    """Sends requests, every wait under a deadline; follows no redirect, keeps no cookie."""

    async def send(
        self,
        engine: str,
        url: str,
        *,
        method: str,
        content: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float | None,
    ) -> WireAnswer:
        """The head of the answer, which the caller closes. Raises UpstreamError.

        ``timeout_s`` bounds all of it; without it only each wait has its deadline.
        """


class Reply(Struct, frozen=True):
    """An engine's successful answer, its body not yet read."""

    engine: str
    answer: WireAnswer

    @property
    def status(self) -> int:
        """A 2xx."""
        return self.answer.status

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The engine's own."""
        return self.answer.headers

    @property
    def content_type(self) -> str:
        """Of the body; JSON when the engine does not say."""
        return self.answer.content_type

    @property
    def size_bytes(self) -> int | None:
        """Of the body, where the engine tells it."""
        named = {name.lower(): value for name, value in self.answer.headers}
        told = named.get("content-length", "")
        return int(told) if told.isascii() and told.isdigit() and len(told) < 16 else None

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, at most ANSWER_BYTES_MAX. Raises UpstreamError."""
        read_bytes = 0
        while chunk := await self.answer.read():
            read_bytes = self._counted(read_bytes + len(chunk))
            yield chunk

    async def parts(self) -> tuple[bytes, ...]:
        """The whole body, in the parts in which it came. Raises UpstreamError."""
        return tuple([chunk async for chunk in self.chunks()])

    async def whole(self) -> bytes:
        """The whole body, which is small. Raises UpstreamError."""
        return b"".join(await self.parts())

    def close(self) -> None:
        """Give the connection back; a body that was not read to its end is cut off."""
        self.answer.close()

    def _counted(self, read_bytes: int) -> int:
        if read_bytes > ANSWER_BYTES_MAX:
            raise EngineBroke(self.engine, f"sends more than {ANSWER_BYTES_MAX} bytes")
        return read_bytes


class Upstream:
    """Calls engines. Knows only the URLs that it is given."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def send(
        self,
        engine: str,
        url: str,
        *,
        method: str = "POST",
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """Send a request; the caller closes its reply.

        Raises UpstreamError for every answer that is not a 2xx.
        """
        answer = await self._wire.send(
            engine, url, method=method, content=content, headers=headers or {}, timeout_s=timeout_s
        )
        if 200 <= answer.status < 300:
            return Reply(engine, answer)
        try:
            raise await _failure(engine, answer)
        finally:
            answer.close()

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
        """The reply to a request, as ``send`` gives it, until the block is left."""
        reply = await self.send(
            engine, url, method=method, content=content, headers=headers, timeout_s=timeout_s
        )
        try:
            yield reply
        finally:
            reply.close()


async def _failure(engine: str, answer: WireAnswer) -> UpstreamError:
    """The error that a bad status stands for."""
    content = b""
    try:
        while len(content) <= ERROR_BYTES_MAX and (chunk := await answer.read()):
            content += chunk
    except UpstreamError as exc:
        return exc
    status, content = answer.status, content[:ERROR_BYTES_MAX]
    if status == 429:
        return EngineBusy(engine, "status 429")
    if 400 <= status < 500:
        return EngineRefused(
            engine, status=status, content=content, content_type=answer.content_type
        )
    error = parsed(content)
    reason = f"status {status}: {error_text(error)}"
    return EngineBroke(engine, reason, status=status, error=error)


def parsed(content: bytes) -> Any:
    """JSON, or None when it is none, or none that could be passed on."""
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    return None if is_too_deep(content, value) else value


def error_text(error: object) -> str:
    """What an engine's error body says, shortened."""
    if not isinstance(error, dict):
        return "no reason given"
    inner = error.get("error", error)
    inner = inner if isinstance(inner, dict) else {"message": inner}
    said = inner.get("message") or inner.get("detail") or inner.get("type") or "no reason given"
    return str(said)[:500]
