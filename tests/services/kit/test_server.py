"""Our own server's side of a connection: whole answers in one write, and clients that leave."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from services.kit.server import (
    JOINED_BYTES_MAX,
    START,
    CallerProtocol,
    PlainCaller,
    WholeSend,
    caller_of,
    protocol_of,
)

HEADERS = [(b"content-type", b"text/plain"), (b"content-length", b"5")]
WHOLE = {"type": START, "status": 200, "headers": HEADERS, "body": b"hello"}
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE = 200_000  # the server stops reading far below


class FakeTransport:
    """Notes what is written, part by part, and whether it is read from."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.is_closed = self.is_paused = False

    def write(self, data: bytes) -> None:
        self.parts.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_extra_info(self, name: str) -> None:
        return None


def connected(app: ASGIApp) -> tuple[CallerProtocol, FakeTransport]:
    config = uvicorn.Config(cast("Any", app), log_level="critical", lifespan="off")
    state = ServerState()
    state.default_headers = [(b"date", b"today")]
    protocol, transport = CallerProtocol(config, state, {}), FakeTransport()
    protocol.connection_made(cast("asyncio.Transport", transport))
    return protocol, transport


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def answering(send_whole: bool) -> ASGIApp:
    """An application that gives one answer, as one message or as two."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if send_whole:
            protocol = protocol_of(scope)
            assert protocol is not None
            await WholeSend(protocol, scope, send)(WHOLE)
        else:
            await send({"type": START, "status": 200, "headers": HEADERS})
            await send({"type": "http.response.body", "body": b"hello"})

    return app


def waiting(work: Callable[[Scope, Receive, Send], Awaitable[None]]) -> ASGIApp:
    """An application that reads the body, and then works."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await work(scope, receive, send)
        await answering(send_whole=True)(scope, receive, send)

    return app


@pytest.mark.parametrize(
    "request_head",
    [
        GET,
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
async def test_a_whole_answer_has_the_bytes_of_one_in_two_messages(request_head: bytes) -> None:
    written = []
    for send_whole in (False, True):
        protocol, transport = connected(answering(send_whole))
        protocol.data_received(request_head)
        await settled()
        written.append((b"".join(transport.parts), transport.is_closed))
    assert written[0] == written[1]
    assert written[0][0].startswith(b"HTTP/1.1 200 OK\r\ndate: today\r\n")


async def test_a_whole_answer_is_one_write_and_another_request_may_follow() -> None:
    protocol, transport = connected(answering(send_whole=True))
    for count in (1, 2):
        protocol.data_received(GET)
        await settled()
        assert len(transport.parts) == count
        assert transport.parts[-1].endswith(b"\r\n\r\nhello")
    assert not transport.is_closed


@pytest.mark.parametrize("over", [0, 1])
async def test_a_large_body_is_not_copied_once_more(over: int) -> None:
    body = b"x" * (JOINED_BYTES_MAX + over)
    headers = [(b"content-length", b"%d" % len(body))]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        protocol = protocol_of(scope)
        assert protocol is not None
        message = {"type": START, "status": 200, "headers": headers, "body": body}
        await WholeSend(protocol, scope, send)(message)

    protocol, transport = connected(app)
    protocol.data_received(GET)
    await settled()
    assert len(transport.parts) == 1 + over
    assert b"".join(transport.parts).endswith(b"\r\n\r\n" + body)


async def test_requests_that_come_at_once_are_answered_in_turn() -> None:
    protocol, transport = connected(answering(send_whole=True))
    protocol.data_received(GET * 3)
    await settled()
    assert b"".join(transport.parts).count(b"\r\n\r\nhello") == 3


async def test_a_client_that_leaves_is_told_of_once() -> None:
    told = []

    async def work(scope: Scope, receive: Receive, _send: Send) -> None:
        caller = caller_of(scope, receive)
        caller.watch(lambda: told.append(scope["path"]))
        await asyncio.Event().wait()

    protocol, _ = connected(waiting(work))
    protocol.data_received(GET)
    await settled()
    assert told == []
    protocol.connection_lost(None)
    assert told == ["/"]
    for task in list(protocol.tasks):
        task.cancel()
    await settled()
    assert told == ["/"]


async def test_one_that_left_before_is_told_of_at_once_and_after_the_end_of_none() -> None:
    told = []

    async def work(scope: Scope, receive: Receive, _send: Send) -> None:
        caller = caller_of(scope, receive)
        caller.watch(lambda: told.append("early"))
        caller.unwatch()
        protocol.connection_lost(None)
        caller.watch(lambda: told.append("late"))

    protocol, transport = connected(waiting(work))
    protocol.data_received(GET)
    await settled()
    assert told == ["late"]
    assert transport.parts == []


async def test_a_client_whose_large_body_stopped_the_reading_is_heard_leaving() -> None:
    async def work(scope: Scope, receive: Receive, _send: Send) -> None:
        assert transport.is_paused
        caller_of(scope, receive).watch(lambda: None)
        assert not transport.is_paused

    protocol, transport = connected(waiting(work))
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % LARGE
    protocol.data_received(head)
    await settled()
    protocol.data_received(b"x" * LARGE)
    await settled()
    assert len(transport.parts) == 1


async def test_the_end_of_one_request_does_not_end_the_watch_of_the_next() -> None:
    told: list[str] = []
    callers = []

    async def work(scope: Scope, receive: Receive, _send: Send) -> None:
        callers.append(caller_of(scope, receive))
        callers[-1].watch(lambda: told.append(scope["path"]))
        if len(callers) == 2:
            callers[0].unwatch()
            await asyncio.Event().wait()

    protocol, _ = connected(waiting(work))
    protocol.data_received(GET + GET.replace(b"/ ", b"/second "))
    await settled()
    protocol.connection_lost(None)
    assert told == ["/second"]
    for task in list(protocol.tasks):
        task.cancel()
    await settled()


async def test_under_another_server_a_task_watches() -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    told: list[None] = []
    caller = caller_of({"type": "http"}, receive)
    assert isinstance(caller, PlainCaller)
    caller.watch(lambda: told.append(None))
    await settled()
    assert told == [None]
    caller.unwatch()


async def nothing(_scope: Scope, _receive: Receive, _send: Send) -> None:
    """No work."""
