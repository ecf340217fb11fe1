"""Bytes that few clients send, on the connections of several workers."""

import asyncio
from pathlib import Path

import orjson
import pytest

from tests.services.inference_proxy.harness import GENERATE
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.workers import PROMPT, Workers, session_of, turn, workers

pytestmark = pytest.mark.e2e


async def said(proxy: Workers, content: bytes) -> bytes:
    """The answer to these bytes, of which the proxy is sent no end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(content)
    async with asyncio.timeout(10):
        answer = await reader.readuntil(b"\r\n")
    writer.close()
    return answer.rstrip()


async def test_unusual_requests_are_answered_as_by_one_worker(tmp_path: Path) -> None:
    async with workers({"e0": StubEngine()}, tmp_path) as proxy:
        for _ in range(4):  # whichever worker it arrives at
            for target in ("http://proxy/v1/engines", "/v1/engines#part", " /v1/engines"):
                for before in ("", "\r\n", "\r\n\r\n"):
                    request = f"{before}GET {target} HTTP/1.1\r\nHost: proxy\r\n\r\n"
                    assert await said(proxy, request.encode()) == b"HTTP/1.1 200 OK", request
        refused = b"HTTP/1.1 400 Bad Request"
        for never in (b"\x16\x03\x01\x02\x00", b"GET /healthz HTTP/1.1\nHost: proxy\n\n"):
            assert await said(proxy, never) == refused


@pytest.mark.parametrize("count", [1, 2])
async def test_a_head_has_one_limit_whoever_it_belongs_to(tmp_path: Path, count: int) -> None:
    body = orjson.dumps(turn(PROMPT, "padded"))
    async with workers({"e0": StubEngine()}, tmp_path, count=count) as proxy:
        for worker in (0, 1):
            head = (
                f"POST {GENERATE} HTTP/1.1\r\nHost: proxy\r\nContent-Type: application/json\r\n"
                f"X-Sideband-Session: {session_of(worker)}\r\nX-Sideband-Kind: train\r\n"
                f"Content-Length: {len(body)}\r\nX-Pad: "
            ).encode()
            for _ in range(4):  # whichever worker it arrives at
                for pad_bytes, status in ((50_000, b"200 OK"), (300_000, b"431 Request Header")):
                    request = head + b"x" * pad_bytes + b"\r\n\r\n" + body
                    assert (await said(proxy, request)).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("count", [1, 2])
async def test_a_refused_head_names_its_own_path(tmp_path: Path, count: int) -> None:
    async with workers({"e0": StubEngine()}, tmp_path, count=count) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        for request in (
            b"GET /healthz HTTP/1.1\r\nHost: proxy\r\n\r\n",
            b"GET /version?a=1 HTTP/1.1\r\nX-Pad: " + b"x" * 300_000,
        ):
            writer.write(request)
            async with asyncio.timeout(10):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                body = orjson.loads(await reader.readexactly(length))
        assert (body["code"], body["instance"]) == ("head_too_large", "/version")
        writer.close()
