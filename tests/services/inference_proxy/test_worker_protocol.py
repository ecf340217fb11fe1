"""Bytes that few clients send, on the connections of several workers."""

import asyncio
from pathlib import Path

import pytest

from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.workers import Workers, workers

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
