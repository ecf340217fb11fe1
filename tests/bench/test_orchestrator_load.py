"""The load on the orchestrator: a service that is too slow shows as late, never as a failure."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from bench.http.processes import free_port
from bench.http.wire import MessageSplitter, response
from bench.orchestrator.load import run

ANSWER_S = 0.05


class SlowService(asyncio.Protocol):
    """Takes everything, each after a while."""

    def __init__(self) -> None:
        self._splitter = MessageSplitter()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for head, _ in self._splitter.feed(data):
            status = b"202 Accepted" if b"/v1/rollouts" in head else b"200 OK"
            answer = response(b'{"policy_version": 0}', status)
            assert self._transport is not None
            asyncio.get_running_loop().call_later(ANSWER_S, self._transport.write, answer)


@contextmanager
def slow_service(port: int) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    server: Any = loop.run_until_complete(loop.create_server(SlowService, "127.0.0.1", port))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_delivery_whose_lease_is_late_is_late_itself() -> None:
    port = free_port()
    with slow_service(port):
        outcome = run(port, free_port(), os.getpid(), in_flight=1, rate=100.0, seconds=0.1)
    assert len(outcome.latencies_s) == 10
    # One lease at a time: each waits for two answers, which the service makes last so long.
    assert outcome.rate <= 1 / (2 * ANSWER_S)
