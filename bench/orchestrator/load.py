"""Many rollouts in flight and a fixed rate of deliveries, each followed by a new lease.

An open loop: deliveries are due by the clock, whatever the answers take; so a service that is too
slow shows as latency and as a rate below the one asked for, never as a lighter load.
"""

import asyncio
import time
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Final

import orjson
import psutil
import uvloop

from bench.http.wire import Exchange
from bench.orchestrator.bodies import Deliveries, lease_request
from bench.orchestrator.feed import InstantFeed

CONNECTIONS: Final = 64
ANSWER_TIMEOUT_S: Final = 60.0
TIMEOUT_S: Final = 240.0  # beyond the seconds asked for: the leases, and what a slow service owes


class WrongAnswer(RuntimeError):
    """The orchestrator refused what it must take."""


@dataclass(slots=True)
class Outcome:
    """What the client saw."""

    latencies_s: list[float] = field(default_factory=list)  # of deliveries, from when they were due
    seconds: float = 0.0
    cpu_s: float = 0.0  # of the service, over those seconds
    half_bytes: int = 0  # resident in the service, when half of the deliveries were due
    end_bytes: int = 0
    steps: int = 0
    metrics: str = ""

    def quantile_s(self, percent: int) -> float:
        """A percentile of the latencies."""
        return quantiles(self.latencies_s, n=100)[percent - 1]

    @property
    def rate(self) -> float:
        """Deliveries that were answered, per second."""
        return len(self.latencies_s) / self.seconds


def run(
    port: int, feed_port: int, pid: int, *, in_flight: int, rate: float, seconds: float
) -> Outcome:
    """Lease ``in_flight`` rollouts, then deliver ``rate`` a second for ``seconds``.

    ``pid`` is the service's process.
    """
    client = _Client(port, pid, in_flight=in_flight, rate=rate, seconds=seconds)
    return uvloop.run(client.run(feed_port))


class _Client:
    def __init__(self, port: int, pid: int, *, in_flight: int, rate: float, seconds: float) -> None:
        self._process = psutil.Process(pid)
        self._port, self._in_flight, self._rate, self._seconds = port, in_flight, rate, seconds
        self._idle: asyncio.Queue[Exchange] = asyncio.Queue()
        self._open: asyncio.Queue[tuple[int, int]] = asyncio.Queue()  # serial, policy version
        self._deliveries = Deliveries()
        self._next_serial = 0
        self._version = 0
        self._outcome = Outcome()
        self._applied: asyncio.Queue[int] = asyncio.Queue()

    async def run(self, feed_port: int) -> Outcome:
        loop = asyncio.get_running_loop()
        feed = InstantFeed(self._applied.put_nowait)
        server = await loop.create_server(feed.protocol, "127.0.0.1", feed_port)
        exchanges = [
            (await loop.create_connection(Exchange, "127.0.0.1", self._port))[1]
            for _ in range(CONNECTIONS)
        ]
        for exchange in exchanges:
            self._idle.put_nowait(exchange)
        applying = asyncio.create_task(self._apply())
        try:
            async with asyncio.timeout(self._seconds + TIMEOUT_S):
                await self._load()
        finally:
            applying.cancel()
            await asyncio.gather(applying, return_exceptions=True)
            # All of it: a loop that is closed around open connections never ends.
            for exchange in exchanges:
                exchange.close()
            for connection in feed.connections:
                connection.close()
            server.close()
            await asyncio.sleep(0.05)
        return self._outcome

    async def _load(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._in_flight):
                group.create_task(self._lease())
        await self._deliver_all()
        self._outcome.metrics = (await self._ask(b"GET", "/metrics")).decode()

    async def _deliver_all(self) -> None:
        count = int(self._rate * self._seconds)
        begin_s, before = time.perf_counter(), self._process.cpu_times()
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                if number == count // 2:
                    self._outcome.half_bytes = self._process.memory_info().rss
                due_s = begin_s + number / self._rate
                wait_s = due_s - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(self._deliver(due_s))
        self._outcome.seconds = time.perf_counter() - begin_s
        self._outcome.end_bytes = self._process.memory_info().rss
        after = self._process.cpu_times()
        self._outcome.cpu_s = after.user + after.system - before.user - before.system

    async def _deliver(self, due_s: float) -> None:
        serial, version = await self._open.get()  # a late lease makes a late delivery
        await self._send(self._deliveries.request(serial, version), b"202")
        self._outcome.latencies_s.append(time.perf_counter() - due_s)
        await self._lease()

    async def _lease(self) -> None:
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        body = await self._send(lease_request(serial), b"200")
        self._open.put_nowait((serial, orjson.loads(body)["policy_version"]))

    async def _apply(self) -> None:
        """Inference applies v(s) as soon as step s is committed."""
        while True:
            step = await self._applied.get()
            self._outcome.steps += 1
            await self._ask(b"PUT", "/v1/policy-version", orjson.dumps({"policy_version": step}))

    async def _ask(self, method: bytes, path: str, body: bytes = b"") -> bytes:
        head = f" {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        length = f"content-length: {len(body)}\r\n\r\n"
        return await self._send(method + (head + length).encode() + body, b"200")

    async def _send(self, data: bytes, status: bytes) -> bytes:
        exchange = await self._idle.get()
        try:
            head, body = await exchange.send(data, ANSWER_TIMEOUT_S)
        finally:
            self._idle.put_nowait(exchange)
        if head.split(b" ", 2)[1] != status:
            raise WrongAnswer(f"{data[:40]!r}: {head[:40]!r} {body[:500]!r}")
        return body
