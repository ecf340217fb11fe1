"""A feed that commits every step as soon as it comes: only what the orchestrator asks of one."""

import asyncio
from collections.abc import Callable
from typing import cast

import orjson

from bench.http.wire import MessageSplitter, response
from bench.orchestrator.bodies import RUN_ID


class InstantFeed:
    """Takes steps and has them committed. ``on_step`` hears of each."""

    def __init__(self, on_step: Callable[[int], None]) -> None:
        self._on_step = on_step
        self.committed: int | None = None
        self.connections: list[asyncio.Transport] = []

    def protocol(self) -> asyncio.Protocol:
        """One connection."""
        return _Connection(self)

    def answer(self, head: bytes) -> bytes:
        """The answer to one request."""
        method, path, _ = head.split(b" ", 2)
        if method == b"PUT":
            self.committed = int(path.rsplit(b"/", 1)[1])
            self._on_step(self.committed)
            return response(b"{}", b"201 Created")
        if path == b"/v1/steps":
            return response(orjson.dumps({"feed_instance": "bench", "steps": []}))
        return response(orjson.dumps({"run_id": RUN_ID, "committed_step": self.committed}))


class _Connection(asyncio.Protocol):
    def __init__(self, feed: InstantFeed) -> None:
        self._feed, self._splitter = feed, MessageSplitter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's
        self._transport = cast("asyncio.Transport", transport)
        self._feed.connections.append(self._transport)

    def data_received(self, data: bytes) -> None:
        for head, _body in self._splitter.feed(data):
            self._transport.write(self._feed.answer(head))
