"""The wire over aiohttp on real sockets: errors become ours, and what is held is given back."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import client_exceptions

from services.inference_proxy.config import ProxySettings
from services.inference_proxy.upstream import (
    EngineBroke,
    EngineBusy,
    EngineTimeout,
    EngineUnreachable,
    Upstream,
)
from services.inference_proxy.wire import ERRORS, PART_BYTES, open_wire, translate

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


def every_subclass(kind: type[Exception]) -> set[type[Exception]]:
    return {kind} | {leaf for sub in kind.__subclasses__() for leaf in every_subclass(sub)}


def test_every_error_of_the_http_library_has_ours() -> None:
    library = {getattr(client_exceptions, name) for name in client_exceptions.__all__}
    library -= {client_exceptions.WSMessageTypeError}  # of web sockets that are used wrongly
    library |= {TimeoutError, OSError, ConnectionResetError}
    for kind in sorted(library | every_subclass(aiohttp.ClientError), key=str):
        assert issubclass(kind, ERRORS), kind
        bare: Any = type(kind.__name__, (kind,), {"__str__": lambda _: "said"})
        error = translate("e0", bare.__new__(bare))
        assert isinstance(error, (EngineBroke, EngineTimeout, EngineUnreachable))
        assert error.is_retryable
        no_connection = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
        assert error.is_dead == issubclass(kind, no_connection)


async def test_nothing_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/x"
        async with open_wire(ProxySettings()) as wire:
            with pytest.raises(EngineUnreachable):
                async with Upstream(wire).open("e0", url):
                    pass


@pytest.mark.parametrize(
    "said",
    [
        (),
        (b"SSH-2.0\r\n\r\n",),
        (answer(b"whole")[:-2],),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nwhole\r\n",),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",),
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
