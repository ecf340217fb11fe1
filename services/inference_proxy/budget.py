"""A bound on bytes that are held at the same time, given out in order of arrival."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    """At most ``bytes_max`` are claimed at once; a larger claim waits to be alone.

    First come, first served, so that a large claim is not starved by small ones. A claim is made
    once and whole: nobody waits while holding a part, so nobody waits for ever.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = self._free = bytes_max
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held_bytes(self) -> int:
        """Claimed now."""
        return self._bytes_max - self._free

    @asynccontextmanager
    async def claim(self, size_bytes: int) -> AsyncIterator[None]:
        """Hold ``size_bytes`` for the block. Cancelling the wait gives its place up."""
        size_bytes = min(size_bytes, self._bytes_max)
        if self._waiting or size_bytes > self._free:
            await self._wait(size_bytes)
        else:
            self._free -= size_bytes
        try:
            yield
        finally:
            self._free += size_bytes
            self._serve()

    async def _wait(self, size_bytes: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (size_bytes, turn)
        self._waiting.append(place)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was served in the same moment
                self._free += size_bytes
            else:
                self._waiting.remove(place)
            self._serve()
            raise

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            size_bytes, turn = self._waiting.popleft()
            self._free -= size_bytes
            turn.set_result(None)
