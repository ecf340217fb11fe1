"""The wire over aiohttp: one session to all engines, its errors translated here and only here."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Final

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from yarl import URL

from services.inference_proxy.config import ProxySettings
from services.inference_proxy.headers import is_sendable
from services.inference_proxy.limits import ENGINES_MAX
from services.inference_proxy.upstream import (
    EngineBroke,
    EngineBusy,
    EngineTimeout,
    EngineUnreachable,
    UpstreamError,
)

# A server may close an idle connection at any time: short-lived ones rarely meet that.
KEEPALIVE_S: Final = 2.0
READ_BUFFER_BYTES: Final = 1 << 20  # large answers wake their reader less often
PART_BYTES: Final = 256 << 10  # of a body sent under one write deadline; less goes at once
# Everything that aiohttp raises; the two builtins also come bare.
ERRORS: Final = (aiohttp.ClientError, TimeoutError, OSError)

parsed_url = lru_cache(maxsize=4 * ENGINES_MAX)(URL)  # engines times routes


class LargeBody(Payload):
    """A body sent in parts, each under a deadline: an engine may stop reading."""

    def __init__(self, content: bytes, *, write_timeout_s: float) -> None:
        super().__init__(content)
        self._content, self._write_timeout_s = content, write_timeout_s
        self._size = len(content)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Text of the body; aiohttp asks for it only to show it."""
        return self._content.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Send all parts. Raises TimeoutError."""
        view = memoryview(self._content)
        for start in range(0, len(view), PART_BYTES):
            async with asyncio.timeout(self._write_timeout_s):
                await writer.write(view[start : start + PART_BYTES])


class AiohttpAnswer:
    """The answer to one request, until it is closed."""

    def __init__(
        self, engine: str, response: aiohttp.ClientResponse, slots: asyncio.Semaphore
    ) -> None:
        self._engine, self._response, self._slots = engine, response, slots
        self._is_open = True
        self.status = response.status
        content_type = response.headers.get("content-type", "application/json")
        self.content_type = content_type if is_sendable(content_type) else "application/json"

    @property
    def headers(self) -> list[tuple[str, str]]:
        """As the engine sent them."""
        return list(self._response.headers.items())

    async def read(self) -> bytes:
        """The next part of the body, empty at its end. Raises UpstreamError."""
        try:
            return await self._response.content.readany()
        except ERRORS as exc:
            raise translate(self._engine, exc) from exc

    def close(self) -> None:
        """Give the connection back; an answer that was not read to its end is cut off."""
        if self._is_open:
            self._is_open = False
            self._response.close()
            self._slots.release()


class AiohttpWire:
    """Sends requests over one session, at most ``connections_max`` at a time."""

    def __init__(self, session: aiohttp.ClientSession, settings: ProxySettings) -> None:
        self._session, self._settings = session, settings
        self._slots = asyncio.Semaphore(settings.connections_max)
        self._deadlines = aiohttp.ClientTimeout(
            total=None,
            sock_connect=settings.connect_timeout_s,
            sock_read=settings.read_timeout_s,
        )

    async def send(
        self,
        engine: str,
        url: str,
        *,
        method: str,
        content: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float | None,
    ) -> AiohttpAnswer:
        """The head of the answer, which the caller closes. Raises UpstreamError."""
        await self._take_slot(engine)
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._session.request(
                method,
                parsed_url(url),
                data=self._body(content),
                headers=headers,
                allow_redirects=False,
                timeout=self._deadlines
                if timeout_s is None
                else aiohttp.ClientTimeout(total=timeout_s),
            )
        except ERRORS as exc:
            raise translate(engine, exc) from exc
        finally:
            if response is None:  # a cancelled call gives its slot back too
                self._slots.release()
        answer = AiohttpAnswer(engine, response, self._slots)
        encoding = response.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            answer.close()
            raise EngineBroke(engine, f"answers in an encoding that nobody asked for: {encoding}")
        return answer

    async def _take_slot(self, engine: str) -> None:
        if not self._slots.locked():
            await self._slots.acquire()  # at once
            return
        try:
            async with asyncio.timeout(self._settings.pool_timeout_s):
                await self._slots.acquire()
        except TimeoutError as exc:
            raise EngineBusy(engine, "no free connection in time") from exc

    def _body(self, content: bytes | None) -> bytes | LargeBody | None:
        if content is None or len(content) <= PART_BYTES:
            return content
        return LargeBody(content, write_timeout_s=self._settings.write_timeout_s)


@asynccontextmanager
async def open_wire(settings: ProxySettings) -> AsyncIterator[AiohttpWire]:
    """A wire for the time of the block. No proxy of the environment, no cookies, no encodings."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"accept-encoding": "identity"},
        read_bufsize=READ_BUFFER_BYTES,
        trust_env=False,
    )
    async with session:
        yield AiohttpWire(session, settings)


def translate(engine: str, error: Exception) -> UpstreamError:
    """Our error for one of ERRORS, the most specific first."""
    named = f"{type(error).__name__}: {error}"[:500]
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        return EngineUnreachable(engine, named)
    if isinstance(error, TimeoutError):
        return EngineTimeout(engine, named)
    return EngineBroke(engine, named)
