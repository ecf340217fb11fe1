"""Just enough HTTP/1.1 for kept connections and a ``Content-Length``, as an asyncio protocol."""

import asyncio
from typing import Final, cast

_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"content-length:"


class MessageSplitter:
    """Cuts a byte stream into (head, body) messages."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._body_at = -1
        self._stop = 0

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Every message that is complete by now."""
        self._data += data
        found: list[tuple[bytes, bytes]] = []
        while True:
            if self._body_at < 0:
                end = self._data.find(_END)
                if end < 0:
                    return found
                self._body_at = end + len(_END)
                self._stop = self._body_at + _length_of(bytes(self._data[:end]).lower())
            if len(self._data) < self._stop:
                return found
            head = bytes(self._data[: self._body_at])
            found.append((head, bytes(self._data[self._body_at : self._stop])))
            del self._data[: self._stop]
            self._body_at = -1


def _length_of(head: bytes) -> int:
    at = head.find(_LENGTH)
    if at < 0:
        return 0
    line, _, _ = head[at + len(_LENGTH) :].partition(b"\r\n")
    return int(line)


def response(body: bytes, status: bytes = b"200 OK") -> bytes:
    """A JSON response that keeps the connection."""
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def request(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """A JSON POST on a kept connection."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{lines}\r\n"
    )
    return head.encode() + body


class Exchange(asyncio.Protocol):
    """One client connection: one request at a time."""

    def __init__(self) -> None:
        self._splitter = MessageSplitter()
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[bytes, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for message in self._splitter.feed(data):
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("closed by the server"))

    async def send(self, data: bytes, timeout_s: float) -> tuple[bytes, bytes]:
        """The (head, body) of the answer. Raises TimeoutError and OSError."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        async with asyncio.timeout(timeout_s):
            return await self._answer

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()
