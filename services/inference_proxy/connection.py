"""One HTTP/1.1 connection to an engine: a request goes out, the parts of its answer come back.

httptools reads the bytes, as it does for our own server; what is here is who waits for what, and
until when. One timer serves every wait of a connection, so a deadline that moves costs nothing.
"""

import asyncio
from collections.abc import Callable
from typing import Final, cast

import httptools

HEAD_BYTES_MAX: Final = 64 << 10  # of an answer's head, and what comes with it at once
UNREAD_BYTES_MAX: Final = 1 << 20  # of a body that nobody has read yet: then the engine waits
PART_BYTES: Final = 256 << 10  # of a request sent under one write deadline; less goes at once
_FRAMES: Final = frozenset({b"content-length", b"transfer-encoding"})  # say where a body ends


class ConnectionBroke(Exception):
    """The connection ended, or what came over it is no HTTP."""


class Connection(asyncio.Protocol):
    """Used by one caller at a time, who sends, waits for the head, and reads to the end.

    ``on_end`` is called once, when the connection is of no more use.
    """

    def __init__(self, on_end: Callable[["Connection"], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = 0.0  # of the waiter, in the loop's time
        self._is_write_paused = self._is_read_paused = False
        self._broken_by: str | None = None  # a text: an error that was raised refers to all of this
        self.idle_since_s = 0.0
        self._begin(is_asked=False)

    def _begin(self, *, is_asked: bool) -> None:
        self._is_asked = is_asked
        self._parts: list[bytes] = []
        self._unread_bytes = self._bare_bytes = 0  # the latter: since a byte of a body came
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []  # as they came
        self._has_head = self._is_whole = self._keeps = False

    @property
    def is_reusable(self) -> bool:
        """Whether another request may follow: the answer is whole, and nothing came after it."""
        return self._is_whole and self._keeps and self._broken_by is None

    async def send(self, head: bytes, content: bytes, *, write_s: float) -> None:
        """Write a request. An answer that comes before its end stops the writing.

        Raises TimeoutError when the engine takes nothing for ``write_s``, and ConnectionBroke.
        """
        self._begin(is_asked=True)
        if len(content) <= PART_BYTES:
            self._write(head + content)
            return
        self._write(head)
        view = memoryview(content)
        for start in range(0, len(view), PART_BYTES):
            if self._has_head:
                return
            self._write(view[start : start + PART_BYTES])
            while self._is_write_paused and not self._has_head:
                await self._wait(self._loop.time() + write_s)

    async def wait_for_head(self, deadline_s: float) -> None:
        """Until the answer has begun. Raises TimeoutError and ConnectionBroke."""
        while not self._has_head:
            await self._wait(deadline_s)

    async def read(self, deadline_s: float) -> bytes:
        """What has come of the body, at least a byte; empty at its end.

        Raises TimeoutError and ConnectionBroke.
        """
        while not self._parts and not self._is_whole:
            await self._wait(deadline_s)
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts, self._unread_bytes = [], 0
        if self._is_read_paused and self._transport is not None:
            self._is_read_paused = False
            self._transport.resume_reading()
        return data

    def abort(self, why: str = "closed by the proxy") -> None:
        """Cut it off: the engine stops working on what it was asked."""
        if self._transport is not None:
            self._transport.abort()
        self._end(why)

    # Called by the loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._has_head and not self._is_whole and not self._is_framed():
            self._is_whole = True  # such a body ends with its connection
        self._transport = None
        self._end("closed by the engine" if exc is None else f"{type(exc).__name__}: {exc}")

    def data_received(self, data: bytes) -> None:
        if self._parser is None or not self._is_asked or self._is_whole:
            self.abort("the engine speaks unasked")
            return
        self._bare_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self.abort(f"no HTTP answer: {type(exc).__name__} {exc}"[:300])
            return
        if self._bare_bytes > HEAD_BYTES_MAX and not self._is_whole:
            what = "fields behind its body" if self._has_head else "head"
            self.abort(f"the answer's {what} has more than {HEAD_BYTES_MAX} bytes")
            return
        if not self._has_head:
            return
        if self._unread_bytes > UNREAD_BYTES_MAX and self._transport is not None:
            self._is_read_paused = True
            self._transport.pause_reading()
        self._wake()

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._wake()

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._keeps = False  # a second answer to one request: nothing that follows is trusted

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # else it is a trailer
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None, "it is what calls"
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = []  # an interim answer: the real one follows
        elif not self._has_head:
            self.status, self._has_head = status, True
            self._bare_bytes = 0

    def on_body(self, data: bytes) -> None:
        self._bare_bytes = 0
        if self._has_head and not self._is_whole:
            self._parts.append(data)
            self._unread_bytes += len(data)

    def on_message_complete(self) -> None:
        assert self._parser is not None, "it is what calls"
        if self._has_head and not self._is_whole:
            self._is_whole, self._keeps = True, self._parser.should_keep_alive()

    def _is_framed(self) -> bool:
        return any(name.lower() in _FRAMES for name, _ in self.headers)

    def _write(self, data: bytes | memoryview) -> None:
        if self._broken_by is not None or self._transport is None:
            raise ConnectionBroke(self._broken_by or "not connected")
        self._transport.write(data)

    async def _wait(self, deadline_s: float) -> None:
        """Until something happens. Raises TimeoutError at ``deadline_s``, and ConnectionBroke."""
        if self._broken_by is not None:
            raise ConnectionBroke(self._broken_by)
        self._deadline_s = deadline_s
        if self._timer is None or self._timer.when() > deadline_s:
            self._arm(deadline_s)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _arm(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() < self._deadline_s:
            self._arm(self._deadline_s)
        else:
            self._waiter.set_exception(TimeoutError("silent until its deadline"))

    def _end(self, why: str) -> None:
        if self._broken_by is not None:
            return
        self._broken_by = why
        self._parser = None  # which refers to this connection
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake()
        self._on_end(self)
