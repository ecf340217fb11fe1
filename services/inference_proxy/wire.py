"""The wire over TCP and TLS: connections to the engines, kept a while between two requests.

Errors of sockets, of the parser and of deadlines are translated here and only here.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import quote, urlsplit

from services.inference_proxy.config import ProxySettings
from services.inference_proxy.connection import Connection, ConnectionBroke
from services.inference_proxy.headers import is_sendable
from services.inference_proxy.limits import ENGINES_MAX
from services.inference_proxy.upstream import (
    EngineBroke,
    EngineBusy,
    EngineTimeout,
    EngineUnreachable,
)

# A server may close an idle connection at any time: short-lived ones rarely meet that.
KEEPALIVE_S: Final = 2.0
_PORTS: Final = {"http": 80, "https": 443}
_SAFE: Final = "/%:@!$&'()*+,;=~"  # may stand in a path, and in a query, as they are


class Origin(NamedTuple):
    """Where connections go; those of one origin are exchangeable."""

    host: str
    port: int
    is_secure: bool


@lru_cache(maxsize=4 * ENGINES_MAX)  # engines times routes
def parsed_url(method: str, url: str) -> tuple[Origin, bytes]:
    """Where a request goes, and the lines of its head that are always the same."""
    parts = urlsplit(url)
    assert parts.hostname is not None, "the settings check every URL"
    host, port = parts.hostname, parts.port or _PORTS[parts.scheme]
    target = quote(parts.path or "/", safe=_SAFE)
    if parts.query:
        target += f"?{quote(parts.query, safe=_SAFE)}"
    head = (
        f"{method} {target} HTTP/1.1\r\nhost: {parts.netloc}\r\n"
        "user-agent: sideband\r\naccept-encoding: identity\r\n"
    )
    return Origin(host, port, parts.scheme == "https"), head.encode()


class EngineAnswer:
    """The answer to one request, until it is closed."""

    def __init__(self, wire: "HttpWire", call: "_Call", connection: Connection) -> None:
        self._wire, self._call, self._connection = wire, call, connection
        self._is_open = True
        self.status, self._headers = connection.status, connection.headers

    @property
    def content_type(self) -> str:
        """Of the body; JSON when the engine does not say, or says what cannot be sent on."""
        content_type = self.header(b"content-type", "application/json")
        return content_type if is_sendable(content_type) else "application/json"

    @property
    def headers(self) -> list[tuple[str, str]]:
        """As the engine sent them."""
        return [(n.decode("latin-1"), v.decode("latin-1")) for n, v in self._headers]

    def header(self, name: bytes, default: str) -> str:
        """One header's first value; ``name`` is lower case."""
        for found, value in self._headers:
            if len(found) == len(name) and found.lower() == name:
                return value.decode("latin-1")
        return default

    async def read(self) -> bytes:
        """The next part of the body, empty at its end. Raises UpstreamError."""
        assert self._is_open, "the connection may belong to another request by now"
        try:
            return await self._connection.read(self._call.deadline_s())
        except ConnectionBroke as exc:
            raise EngineBroke(self._call.engine, str(exc)) from exc
        except TimeoutError as exc:
            raise EngineTimeout(self._call.engine, str(exc)) from exc

    def close(self) -> None:
        """Give the connection back; an answer that was not read to its end is cut off."""
        if self._is_open:
            self._is_open = False
            self._wire.give_back(self._call.origin, self._connection)


class _Call:
    """What a request under way belongs to, and until when each of its waits may last."""

    __slots__ = ("_loop", "_read_s", "_until_s", "engine", "origin")

    def __init__(
        self, engine: str, origin: Origin, *, read_s: float, timeout_s: float | None
    ) -> None:
        self.engine, self.origin = engine, origin
        self._loop, self._read_s = asyncio.get_running_loop(), read_s
        self._until_s = None if timeout_s is None else self._loop.time() + timeout_s

    def deadline_s(self) -> float:
        """Of a wait that begins now, in the loop's time."""
        if self._until_s is not None:
            return self._until_s
        return self._loop.time() + self._read_s


class HttpWire:
    """At most ``connections_max`` requests at a time, each on a connection of its own."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.connections_max)
        self._open: set[Connection] = set()
        self._idle: dict[Origin, list[Connection]] = {}  # the latest used last
        self._sweep: asyncio.TimerHandle | None = None
        self._tls = ssl.create_default_context()

    async def send(
        self,
        engine: str,
        url: str,
        *,
        method: str,
        content: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float | None,
    ) -> EngineAnswer:
        """The head of the answer, which the caller closes. Raises UpstreamError."""
        origin, head = parsed_url(method, url)
        call = _Call(engine, origin, read_s=self._settings.read_timeout_s, timeout_s=timeout_s)
        await self._take_slot(engine)
        connection: Connection | None = None
        answer: EngineAnswer | None = None
        try:
            connection = self._kept(origin) or await self._connected(engine, origin)
            write_s = self._settings.write_timeout_s
            await connection.send(head + _lines(headers, content), content or b"", write_s=write_s)
            await connection.wait_for_head(call.deadline_s())
            answer = EngineAnswer(self, call, connection)
        except ConnectionBroke as exc:
            raise EngineBroke(engine, str(exc)) from exc
        except TimeoutError as exc:
            raise EngineTimeout(engine, str(exc)) from exc
        finally:
            if answer is None:  # also a cancelled call gives back what it has
                self.give_back(origin, connection)
        encoding = answer.header(b"content-encoding", "identity")
        if encoding.lower() != "identity":
            answer.close()
            raise EngineBroke(engine, f"answers in an encoding that nobody asked for: {encoding}")
        return answer

    def give_back(self, origin: Origin, connection: Connection | None) -> None:
        """A request's slot and its connection, if it got one: kept when it may serve again."""
        self._slots.release()
        if connection is None:
            return
        if not connection.is_reusable:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.setdefault(origin, []).append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(KEEPALIVE_S, self._close_old)

    def close(self) -> None:
        """End all connections, used ones too."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._open):
            connection.abort()

    async def _take_slot(self, engine: str) -> None:
        if not self._slots.locked():
            await self._slots.acquire()  # at once
            return
        try:
            async with asyncio.timeout(self._settings.pool_timeout_s):
                await self._slots.acquire()
        except TimeoutError as exc:
            raise EngineBusy(engine, "no free connection in time") from exc

    def _kept(self, origin: Origin) -> Connection | None:
        idle = self._idle.get(origin)
        before_s = asyncio.get_running_loop().time() - KEEPALIVE_S
        while idle:
            connection = idle.pop()
            if connection.is_reusable and connection.idle_since_s > before_s:
                return connection
            connection.abort()
        return None

    async def _connected(self, engine: str, origin: Origin) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(self._open.discard)
        is_connected = False
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                await loop.create_connection(
                    lambda: connection,
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.is_secure else None,
                )
            is_connected = True
        except (OSError, UnicodeError) as exc:  # TimeoutError too; a name may be no host name
            raise EngineUnreachable(engine, f"{type(exc).__name__}: {exc}"[:500]) from exc
        finally:
            if not is_connected:  # cancelled at the last moment it may have a socket
                connection.abort()
        self._open.add(connection)
        return connection

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        before_s, self._sweep = loop.time() - KEEPALIVE_S, None
        for idle in self._idle.values():
            count = sum(one.idle_since_s <= before_s for one in idle)
            for connection in idle[:count]:  # the longest idle first
                connection.abort()
            del idle[:count]
        if any(self._idle.values()):
            self._sweep = loop.call_later(KEEPALIVE_S / 2, self._close_old)


def _lines(headers: Mapping[str, str], content: bytes | None) -> bytes:
    """The rest of a head."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    if content is not None:
        lines.append(f"content-length: {len(content)}\r\n")
    return f"{''.join(lines)}\r\n".encode("latin-1")


@asynccontextmanager
async def open_wire(settings: ProxySettings) -> AsyncIterator[HttpWire]:
    """A wire for the time of the block. No proxy of the environment, no cookies, no encodings."""
    wire = HttpWire(settings)
    try:
        yield wire
    finally:
        wire.close()
        await asyncio.sleep(0)  # the loop closes the sockets in its next turn
