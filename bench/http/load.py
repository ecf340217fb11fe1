"""A closed-loop load: ``in_flight`` clients, each sends its next request when the last is done."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Final, Literal

import uvloop

from bench.http.bodies import Traffic
from bench.http.wire import Exchange, request

SessionUse = Literal["none", "kept", "mixed"]

PATH: Final = "/inference/v1/generate"
SESSION: Final = "x-sideband-session"
ANSWER_TIMEOUT_S: Final = 60.0


class WrongAnswer(RuntimeError):
    """A side that does not do the work cannot be timed."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one run saw."""

    latencies_s: list[float]
    seconds: float
    answer: bytes

    @property
    def p50_s(self) -> float:
        """Median time of a request."""
        return median(self.latencies_s)

    @property
    def p99_s(self) -> float:
        """99th percentile."""
        if len(self.latencies_s) < 2:
            return self.latencies_s[0]
        return quantiles(self.latencies_s, n=100)[98]

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.latencies_s) / self.seconds


def run(
    port: int,
    traffic: Traffic,
    *,
    in_flight: int,
    requests: int,
    headers: Mapping[str, str] | None = None,
    spread_s: float = 0.0,
    sessions: SessionUse = "none",
) -> Load:
    """Send ``requests`` requests and wait for all answers. Raises WrongAnswer, TimeoutError.

    The clients' first requests are spread over ``spread_s``: clients that begin together and wait
    for an equally slow engine stay together, and their queue would be measured. With ``sessions``
    there is one for each client: kept by it, or handed round among all, request by request.
    """
    body, own = traffic.request_body(), dict(headers or {})
    if sessions == "none":
        data = [request(PATH, body, own)]
    else:
        named = ({**own, SESSION: f"bench-{place}"} for place in range(in_flight))
        data = [request(PATH, body, each) for each in named]
    return uvloop.run(
        _run(
            port,
            data,
            in_flight=in_flight,
            requests=requests,
            spread_s=spread_s,
            stride=1 if sessions == "mixed" else 0,
        )
    )


async def _run(
    port: int,
    data: Sequence[bytes],
    *,
    in_flight: int,
    requests: int,
    spread_s: float,
    stride: int,
) -> Load:
    loop = asyncio.get_running_loop()
    exchanges = [
        (await loop.create_connection(Exchange, "127.0.0.1", port))[1] for _ in range(in_flight)
    ]
    latencies_s: list[float] = []
    answers: list[bytes] = []
    left = requests

    async def client(exchange: Exchange, place: int) -> None:
        nonlocal left
        await asyncio.sleep(spread_s * place / in_flight)
        while left > 0:
            left -= 1
            begin = time.perf_counter()
            head, body = await exchange.send(data[place % len(data)], ANSWER_TIMEOUT_S)
            place += stride
            latencies_s.append(time.perf_counter() - begin)
            if not head.startswith(b"HTTP/1.1 200"):
                raise WrongAnswer(f"{head!r} {body[:500]!r}")
            answers[:] = [body]

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for place, exchange in enumerate(exchanges):
            group.create_task(client(exchange, place))
    seconds = time.perf_counter() - begin
    for exchange in exchanges:
        exchange.close()
    return Load(latencies_s, seconds, answers[0])
