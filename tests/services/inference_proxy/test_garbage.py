"""What a request made is gone with its last reference: a cycle would stay until the collector
comes, which then holds up the event loop for all of them at once.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CoroutineType, FrameType, FunctionType
from typing import Any

import httpx
import pytest

from services.inference_proxy.connection import Connection, ConnectionBroke
from services.inference_proxy.wanted import while_wanted
from services.kit.server import PlainCaller
from tests.services.inference_proxy.harness import (
    GENERATE,
    TRAIN,
    Running,
    request_body,
    running,
    served_proxy,
)
from tests.services.inference_proxy.stub import StubEngine

OURS = "/services/"  # in the path of our code, and not of our tests'


@contextmanager
def unreachable() -> Iterator[list[Any]]:
    """Whatever only the collector could free of what the block made, in a list at its end."""
    found: list[Any] = []
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def ours(garbage: list[Any]) -> set[str]:
    """Names of our own objects, functions and frames in it: clients and servers have theirs."""
    names = set()
    for each in garbage:
        if isinstance(each, CoroutineType | FrameType):
            code = each.cr_code if isinstance(each, CoroutineType) else each.f_code
            if OURS in code.co_filename and "/tests/" not in code.co_filename:
                names.add(code.co_qualname)
        elif isinstance(each, FunctionType):
            if each.__module__.startswith("services."):
                names.add(each.__qualname__)
        elif type(each).__module__.startswith("services."):
            names.add(type(each).__qualname__)
    return names


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Running]:
    root = tmp_path / "payloads"
    async with running({"e0": StubEngine()}, root=root, has_sockets=True) as started:
        yield started


@pytest.mark.parametrize("way", ["short", "documented", "streamed"])
async def test_a_request_leaves_nothing_of_ours_to_the_collector(proxy: Running, way: str) -> None:
    body = {**request_body([5, 17, 3, 42]), "stream": way == "streamed"}
    headers = TRAIN | ({"X-Sideband-Logprobs": "engine"} if way == "documented" else {})
    async with served_proxy(proxy) as url, httpx.AsyncClient(base_url=url) as client:

        async def ask(number: int) -> None:
            sent = {**body, "request_id": f"r{number}"}
            assert (await client.post(GENERATE, json=sent, headers=headers)).status_code == 200

        await ask(0)
        with unreachable() as garbage:
            for number in range(1, 6):
                await ask(number)
            await asyncio.sleep(0.05)  # what was cancelled ends
    assert ours(garbage) == set()


async def test_a_scope_that_ends_leaves_nothing_at_all() -> None:
    async def never() -> Any:
        await asyncio.Event().wait()

    with unreachable() as garbage:
        for _ in range(5):
            async with while_wanted(PlainCaller(never), deadline_s=5):
                await asyncio.sleep(0)
        await asyncio.sleep(0.05)
    assert garbage == []


async def test_a_connection_that_ends_leaves_nothing_of_ours() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def lose() -> None:
        ended: list[str] = []
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(lambda _: ended.append("once")), "127.0.0.1", port
        )
        with pytest.raises(ConnectionBroke):
            await connection.wait_for_head(loop.time() + 5)
        assert ended == ["once"]

    async with server:
        await lose()
        with unreachable() as garbage:
            for _ in range(5):
                await lose()
            await asyncio.sleep(0.05)
    assert ours(garbage) == set()
