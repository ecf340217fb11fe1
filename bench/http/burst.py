"""Requests that are sent at once, each on a connection of its own, and their answers."""

import asyncio
from collections.abc import Sequence

import uvloop

from bench.http.load import ANSWER_TIMEOUT_S, PATH, WrongAnswer
from bench.http.wire import Exchange, request


def burst(port: int, bodies: Sequence[bytes]) -> list[bytes]:
    """The bodies of all answers, in order. Raises WrongAnswer, TimeoutError."""
    return uvloop.run(_burst(port, bodies))


async def _burst(port: int, bodies: Sequence[bytes]) -> list[bytes]:
    return await asyncio.gather(*(_one(port, body) for body in bodies))


async def _one(port: int, body: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    _, exchange = await loop.create_connection(Exchange, "127.0.0.1", port)
    try:
        head, answer = await exchange.send(request(PATH, body, {}), ANSWER_TIMEOUT_S)
    finally:
        exchange.close()
    if not head.startswith(b"HTTP/1.1 200"):
        raise WrongAnswer(f"{head!r} {answer[:500]!r}")
    return answer
