"""The server's side of a connection, which tells an application what ASGI has no words for.

By ASGI alone an answer is two messages, which go out as two packets, and only who waits in
``receive`` learns that the client has left, which takes a task for each request. Here it is one
message and a callback. ``caller_of`` works under any server.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol
from weakref import ref

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from services.kit.heads import BoundedProtocol

EXTENSION: Final = "sideband.caller"  # of the ASGI scope
START: Final = "http.response.start"
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


class CallerProtocol(BoundedProtocol):
    """One connection of a client, which is told of to whoever answers it."""

    watching: ServedCaller | None = None  # the latest; of two requests the later one runs
    is_lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the loop, once. The type is uvicorn's, which is narrower than asyncio's."""
        super().connection_made(transport)
        # Weak: a request is reached from its protocol, and must not reach it.
        extension: dict[object, object] = {"protocol": ref(self)}
        self._extensions = {EXTENSION: extension}

    def on_headers_complete(self) -> None:
        """A request begins: its task runs from the loop's next turn on."""
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
