"""uvicorn's HTTP protocol, which also tells an application what ASGI has no words for.

By ASGI alone an answer is two messages, which go out as two packets, and only who waits in
``receive`` learns that the client has left, which takes a task for each request. Here it is one
message and a callback. ``caller_of`` works under any server.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol
from weakref import ref

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from services.kit.problems import HeadTooLarge, render

EXTENSION: Final = "sideband.caller"  # of the ASGI scope
START: Final = "http.response.start"
HEAD_BYTES_MAX: Final = 64 << 10  # of a request's line and headers, with what separates them
JOINED_BYTES_MAX: Final = 64 << 10  # of a body; copying a larger one costs more than a write


class Caller(Protocol):
    """The client of one request whose body was read."""

    def watch(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` once when the client leaves, or soon if it has left already."""

    def unwatch(self) -> None:
        """Tell nothing from now on."""


class ServedCaller:
    """The client of a request that ``CallerProtocol`` serves."""

    __slots__ = ("_protocol", "tell")

    def __init__(self, protocol: "CallerProtocol") -> None:
        self._protocol = protocol
        self.tell: Callable[[], None] | None = None

    def watch(self, tell: Callable[[], None]) -> None:
        """See ``Caller``."""
        self._protocol.flow.resume_reading()  # a large body has paused it, and leaving is read
        self.tell, self._protocol.watching = tell, self
        if self._protocol.is_lost:
            tell()

    def unwatch(self) -> None:
        """See ``Caller``."""
        self.tell = None


class PlainCaller:
    """The client of a request under any other server: a task waits in ``receive``."""

    __slots__ = ("_receive", "_task")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[None] | None = None

    def watch(self, tell: Callable[[], None]) -> None:
        """See ``Caller``."""
        self._task = asyncio.get_running_loop().create_task(self._wait(tell))

    def unwatch(self) -> None:
        """See ``Caller``."""
        if self._task is not None:
            self._task.cancel()  # it ends at its only wait; nobody has to see it
            self._task = None  # it keeps its error, whose frames keep us

    async def _wait(self, tell: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        tell()


class CallerProtocol(HttpToolsProtocol):
    """One connection of a client; its requests are answered one after the other.

    A head of more than ``HEAD_BYTES_MAX`` is a 431 and starts nothing, in however many parts it
    comes. One that is not whole yet is refused when so many bytes of it were read, or a part later.
    """

    watching: ServedCaller | None = None  # the latest; of two requests the later one runs
    is_lost = False
    _is_in_head = False  # a head has begun whose end was not read
    _part_bytes = 0  # of what was read last
    _head_least = _head_most = 0  # bytes of that head: in parts of nothing else, and of any
    is_refused = False  # nothing more is read of this connection

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self.is_refused:
            return  # a client that still sends would be cut off before it has read the answer
        self._part_bytes = len(data)
        if self._is_in_head:
            self._head_most += self._part_bytes
        super().data_received(data)
        if self._is_in_head:
            self._head_least += self._part_bytes
            if self._head_least > HEAD_BYTES_MAX:
                self.refuse_head()

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        self._is_in_head = True
        # The part that it begins in may hold a body before it: that one does not count as read.
        self._head_least, self._head_most = -self._part_bytes, self._part_bytes

    def send_400_response(self, msg: str) -> None:
        """Called for what the parser, or a callback of it, does not take."""
        if self._is_in_head and self._is_head_too_large():
            self.refuse_head()
        else:
            self._is_in_head = False
            super().send_400_response(msg)

    def _is_head_too_large(self) -> bool:
        if self._head_most <= HEAD_BYTES_MAX:
            return False
        line_bytes = len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n\r\n")
        return line_bytes + sum(len(n) + len(v) + 4 for n, v in self.headers) > HEAD_BYTES_MAX

    def refuse_head(self) -> None:
        """Say that it is too large, and close when the client does, or soon."""
        detail = f"the request line and headers have more than {HEAD_BYTES_MAX} bytes"
        answer = render(HeadTooLarge(detail), "")
        headers = [*self.server_state.default_headers, *answer.raw_headers]
        lines = [b"%b: %b\r\n" % header for header in [*headers, (b"connection", b"close")]]
        head = b"".join([STATUS_LINE[answer.status_code], *lines, b"\r\n"])
        self.transport.write(head + bytes(answer.body))
        self.is_refused, self._is_in_head = True, False
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the loop, once. The type is uvicorn's, which is narrower than asyncio's."""
        super().connection_made(transport)
        # Weak: a request is reached from its protocol, and must not reach it.
        extension: dict[object, object] = {"protocol": ref(self)}
        self._extensions = {EXTENSION: extension}

    def on_headers_complete(self) -> None:
        """A request begins: its task runs from the loop's next turn on."""
        if self._is_head_too_large():
            raise HeadTooLarge("told by send_400_response, as all that stops the parser")
        self._is_in_head = False
        super().on_headers_complete()
        self.scope["extensions"] = self._extensions

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop, once."""
        super().connection_lost(exc)
        self.is_lost = True
        watching, self.watching = self.watching, None
        if watching is not None and watching.tell is not None:
            watching.tell()

    def write_whole(self, message: Message) -> None:
        """The answer to the request that came last."""
        cycle = self.cycle
        cycle.response_started = cycle.response_complete = True
        lines = [STATUS_LINE[message["status"]]]
        lines += [b"%b: %b\r\n" % header for header in cycle.default_headers]
        lines += [b"%b: %b\r\n" % header for header in message["headers"]]
        head, body = b"".join([*lines, b"\r\n"]), message["body"]
        if len(body) <= JOINED_BYTES_MAX:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)
        cycle.message_event.set()
        cycle.on_response()

    def takes_whole(self, scope: Scope) -> bool:
        """Whether the answer to that request can be written at once, and nothing else be done."""
        cycle = self.cycle
        if cycle.scope is not scope or scope["method"] == "HEAD":
            return False
        return cycle.keep_alive and not (cycle.disconnected or self.flow.write_paused)


class WholeSend:
    """ASGI's ``send``, which takes whole answers too: a start with a ``body``.

    It has a ``content-length``, and otherwise headers that no client has chosen.
    """

    __slots__ = ("_protocol", "_scope", "_send")

    def __init__(self, protocol: CallerProtocol, scope: Scope, send: Send) -> None:
        self._protocol, self._scope, self._send = protocol, scope, send

    async def __call__(self, message: Message) -> None:
        """Send one message."""
        if "body" not in message or message["type"] != START:
            await self._send(message)
        elif self._protocol.takes_whole(self._scope):
            self._protocol.write_whole(message)
        else:
            await send_whole(self._send, message)


def caller_of(scope: Scope, receive: Receive) -> Caller:
    """The client of the request."""
    protocol = protocol_of(scope)
    return PlainCaller(receive) if protocol is None else ServedCaller(protocol)


def protocol_of(scope: Scope) -> CallerProtocol | None:
    """Our own server's side of the request's connection, if it is ours that serves it."""
    extension = scope.get("extensions", {}).get(EXTENSION)
    protocol: CallerProtocol | None = None if extension is None else extension["protocol"]()
    return protocol


async def send_whole(send: Send, message: Message) -> None:
    """A whole answer in ASGI's two messages."""
    body = message["body"]
    await send({key: value for key, value in message.items() if key != "body"})
    await send({"type": "http.response.body", "body": body, "more_body": False})
