"""The wire on real sockets: errors become ours, and what is held is given back."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from pydantic import SecretStr, ValidationError

from services.inference_proxy import wire as wires
from services.inference_proxy.config import ProxySettings
from services.inference_proxy.connection import HEAD_BYTES_MAX, PART_BYTES
from services.inference_proxy.upstream import (
    EngineBroke,
    EngineBusy,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    Upstream,
)
from services.inference_proxy.wire import open_wire

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def upstream_to(serve: Serve, **settings: Any) -> AsyncIterator[tuple[Upstream, str]]:
    """An adapter, and the URL of a server that does to each connection what ``serve`` does."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, open_wire(ProxySettings(**settings)) as wire:
        yield Upstream(wire), f"http://127.0.0.1:{port}/x"


def answering(*parts: bytes) -> Serve:
    """Reads a request's head, then says ``parts`` and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()

    return serve


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def test_nothing_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/x"
        async with open_wire(ProxySettings()) as wire:
            with pytest.raises(EngineUnreachable):
                async with Upstream(wire).open("e0", url):
                    pass


async def test_a_host_that_is_none_is_unreachable() -> None:
    url = f"http://{'x' * 70}.invalid/"  # no name server is asked: a label has 63 characters
    async with open_wire(ProxySettings()) as wire:
        with pytest.raises(EngineUnreachable):
            async with Upstream(wire).open("e0", url):
                pass


async def test_a_server_without_tls_is_unreachable_over_tls() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer(b"x"))

    async with upstream_to(serve) as (upstream, url):
        with pytest.raises(EngineUnreachable, match="SSL"):
            async with upstream.open("e0", url.replace("http:", "https:")):
                pass


@pytest.mark.parametrize(
    "said",
    [
        (),
        (b"SSH-2.0\r\n\r\n",),
        (answer(b"whole")[:-2],),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nwhole\r\n",),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",),
        (b"HTTP/1.1 200 OK\r\nx: " + b"x" * HEAD_BYTES_MAX,),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * (HEAD_BYTES_MAX // 4),),
        (answer(b"x", "content-encoding: gzip"),),
        (answer(b"x", "location: http://127.0.0.1:9/", status="302 Found"),),
        (answer(b"x", "location: http://127.0.0.1:9/", status="307 Temporary Redirect"),),
    ],
)
async def test_a_torn_or_strange_answer_breaks(said: tuple[bytes, ...]) -> None:
    async with upstream_to(answering(*said)) as (upstream, url):
        with pytest.raises(EngineBroke):
            async with upstream.open("e0", url, content=b"{}") as reply:
                await reply.whole()


async def test_silence_meets_the_read_deadline_before_and_within_an_answer() -> None:
    for said in ((), (answer(b"whole")[:-2],)):

        async def serve(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: Any = said
        ) -> None:
            await answering(*said)(reader, writer)
            await reader.read()  # until the proxy hangs up

        async with upstream_to(serve, read_timeout_s=0.05) as (upstream, url):
            with pytest.raises(EngineTimeout):
                async with upstream.open("e0", url, content=b"{}") as reply:
                    await reply.whole()


async def test_the_deadline_of_a_call_bounds_all_of_it() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.01)

    async with upstream_to(drip) as (upstream, url):
        with pytest.raises(EngineTimeout):
            async with upstream.open("e0", url, method="GET", timeout_s=0.1) as reply:
                await reply.whole()


async def test_an_engine_that_stops_reading_meets_the_write_deadline() -> None:
    gone = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()

    async with upstream_to(deaf, write_timeout_s=0.1) as (upstream, url):
        with pytest.raises(EngineTimeout):
            async with upstream.open("e0", url, content=bytes(32 << 20)):
                pass
        gone.set()


@pytest.mark.parametrize("size_bytes", [0, 1, PART_BYTES, PART_BYTES + 1, 5 * PART_BYTES + 7])
async def test_a_body_of_any_size_arrives_whole_and_declared(size_bytes: int) -> None:
    content = bytes(range(256)) * (size_bytes // 256 + 1)
    content = content[:size_bytes]
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert f"content-length: {size_bytes}\r\n".encode() in head
        assert b"accept-encoding: identity\r\n" in head
        seen.append(await reader.readexactly(size_bytes))
        writer.write(answer(seen[0], "set-cookie: a=b", "x-engine: e"))

    async with upstream_to(serve) as (upstream, url):
        async with upstream.open("e0", url, content=content) as reply:
            assert await reply.whole() == content
            assert ("x-engine", "e") in reply.headers
            assert reply.content_type == "application/json"
        assert seen == [content]


async def test_a_connection_is_used_again_only_after_an_answer_read_to_its_end() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while not reader.at_eof():
            try:
                await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return
            writer.write(answer(b"x" * (4 << 20)))

    async with upstream_to(serve) as (upstream, url):
        for is_read, expected in ((True, 1), (False, 1), (True, 2), (True, 2)):
            async with upstream.open("e0", url, method="GET") as reply:
                if is_read:
                    await reply.whole()
            assert connections == expected


async def test_every_end_of_a_call_gives_its_slot_back() -> None:
    hold = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await hold.wait()
        writer.write(answer(b"x", "connection: close"))

    settings = {"connections_max": 1, "pool_timeout_s": 0.02}
    async with upstream_to(serve, **settings) as (upstream, url):

        async def call() -> bytes:
            async with upstream.open("e0", url, content=b"{}") as reply:
                return await reply.whole()

        held = asyncio.create_task(call())
        await asyncio.sleep(0.01)
        with pytest.raises(EngineBusy):
            await call()
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        hold.set()
        for _ in range(3):
            assert await call() == b"x"
        for _ in range(3):
            with pytest.raises(EngineUnreachable):
                async with upstream.open("e0", "http://127.0.0.1:9/"):
                    pass
        assert await call() == b"x"


async def test_kept_connections_are_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "KEEPALIVE_S", 0.02)
    hung_up = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(b"x"))
        assert await reader.read() == b""
        hung_up.set()

    async with upstream_to(serve) as (upstream, url):
        async with upstream.open("e0", url, method="GET") as reply:
            await reply.whole()
        assert not hung_up.is_set()
        async with asyncio.timeout(5):
            await hung_up.wait()


async def test_an_engine_that_hangs_up_or_speaks_unasked_gets_a_new_connection() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(b"first"))
        await writer.drain()
        if connections == 1:
            await asyncio.sleep(0.01)
            writer.write(answer(b"nobody asked"))

    async with upstream_to(serve) as (upstream, url):
        for number in range(1, 4):
            async with upstream.open("e0", url, method="GET") as reply:
                assert await reply.whole() == b"first"
            assert connections == number
            await asyncio.sleep(0.05)


async def test_a_refusal_before_the_end_of_a_large_request_is_heard() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(b"too much", status="413 Too Large"))
        await writer.drain()
        await asyncio.sleep(0.2)  # it never reads the rest

    async with upstream_to(serve) as (upstream, url):
        with pytest.raises(EngineRefused, match="413"):
            async with upstream.open("e0", url, content=bytes(32 << 20)):
                pass


async def test_a_path_and_a_header_stay_what_they_are() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer(b"x"))

    async with upstream_to(serve) as (upstream, url):
        headers = {"traceparent": "\xe4 b"}
        async with upstream.open("e0", f"{url} a\r\nb: c", method="GET", headers=headers):
            pass
    request_line, *lines = seen[0].split(b"\r\n")
    assert request_line == b"GET /x%20ab:%20c HTTP/1.1"  # urlsplit drops line ends
    assert b"traceparent: \xe4 b" in lines
    assert not any(line.startswith((b"b:", b"content-length")) for line in lines)


async def test_a_query_arrives_with_its_path() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer(b"x"))

    async with (
        upstream_to(serve) as (upstream, url),
        upstream.open("e0", f"{url}/m/?name%5B%5D=a&b=c d#e", method="GET"),
    ):
        pass
    assert seen[0].startswith(b"GET /x/m/?name%5B%5D=a&b=c%20d HTTP/1.1\r\n")


@pytest.mark.parametrize("token", ["two\nlines", "a tab\t", "not latin \u20ac"])
def test_a_token_that_no_header_can_carry_fails_at_start(token: str) -> None:
    with pytest.raises(ValidationError, match="must be one line"):
        ProxySettings(engine_token=SecretStr(token))
    with pytest.raises(ValidationError, match="must be one line"):
        ProxySettings(orchestrator_token=SecretStr(token))


CHECKS: list[Callable[[], Coroutine[Any, Any, None]]] = [
    test_nothing_listens,
    test_a_server_without_tls_is_unreachable_over_tls,
    test_silence_meets_the_read_deadline_before_and_within_an_answer,
    test_the_deadline_of_a_call_bounds_all_of_it,
    test_an_engine_that_stops_reading_meets_the_write_deadline,
    test_a_connection_is_used_again_only_after_an_answer_read_to_its_end,
    test_every_end_of_a_call_gives_its_slot_back,
    test_an_engine_that_hangs_up_or_speaks_unasked_gets_a_new_connection,
    test_a_refusal_before_the_end_of_a_large_request_is_heard,
    test_a_path_and_a_header_stay_what_they_are,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_the_loop_of_the_services_too(check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    uvloop.run(check())
