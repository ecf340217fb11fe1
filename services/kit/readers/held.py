"""A body that is being received: whole when it is small, in parts for a reader when it is large."""

from collections import deque
from collections.abc import AsyncIterable, Iterator
from contextlib import contextmanager
from typing import Final

from services.kit.readers.pool import ReaderPool

# What reading a body of this size takes is less than what the loop may be held for: JSON of kept
# sets, the worst there is, takes 30 ms of one thread a megabyte, 20 ms of them in one call.
SMALL_BYTES_MAX: Final = 1 << 20


class HeldBody:
    """The parts in which a body came. ``whole`` or a reader takes them."""

    def __init__(self, pool: ReaderPool) -> None:
        self._pool = pool
        self._held_bytes = 0
        self.parts: deque[bytes] = deque()
        self.size_bytes = 0

    async def fill(self, stream: AsyncIterable[bytes]) -> None:
        """Take all that comes. Raises ReadersBusy, and what the stream raises."""
        async for part in stream:
            self.add(part)

    def add(self, part: bytes) -> None:
        """Take one part. Raises ReadersBusy."""
        self.size_bytes += len(part)
        if self.is_large:
            self._pool.hold(self.size_bytes - self._held_bytes)
            self._held_bytes = self.size_bytes
        self.parts.append(part)

    @property
    def is_large(self) -> bool:
        """Whether a reader must read it."""
        return self.size_bytes > SMALL_BYTES_MAX

    def whole(self) -> bytes:
        """All of a small one."""
        assert not self.is_large, "joining it would take as long as reading it"
        return b"".join(self.parts)

    def let_go(self) -> None:
        """It is read, or will not be."""
        self.parts.clear()
        self._pool.let_go(self._held_bytes)
        self._held_bytes = 0


@contextmanager
def held_body(pool: ReaderPool) -> Iterator[HeldBody]:
    """An empty body, let go at the end of the block."""
    body = HeldBody(pool)
    try:
        yield body
    finally:
        body.let_go()
