"""Server-sent events as vLLM sends them: split a byte stream, read an event, write one. Pure."""

from collections.abc import Iterator
from typing import Any, Final

import orjson

from services.inference_proxy.upstream import parsed

EVENT_STREAM: Final = "text/event-stream"
DONE: Final = b"data: [DONE]"


class EventTooLarge(Exception):
    """An event outgrew its bound before it ended."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(f"an event has more than {bytes_max} bytes")


class EventSplitter:
    """Cuts a byte stream into whole events, each without its blank line.

    Bytes are kept as a list until an event ends, so that a large last event costs linear time.
    """

    def __init__(self, *, bytes_max: int) -> None:
        self._parts: list[bytes] = []
        self._seam = b""  # the last three bytes: a blank line may lie across reads
        self._size_bytes, self._bytes_max = 0, bytes_max

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Events that ``data`` completes. Raises EventTooLarge."""
        seen = self._seam + data
        self._seam = seen[-3:]
        if b"\n\n" not in seen and b"\r\n\r\n" not in seen:
            self._keep(data)
            return
        whole = b"".join(self._parts) + data
        *events, rest = whole.replace(b"\r\n", b"\n").split(b"\n\n")
        self._parts, self._size_bytes = [], 0
        if rest:
            self._keep(rest)
        yield from (event for event in events if event.strip())

    def rest(self) -> bytes:
        """What is left when the stream ends without a blank line."""
        whole = b"".join(self._parts)
        self._parts, self._size_bytes = [], 0
        return whole.strip()

    def _keep(self, data: bytes) -> None:
        self._parts.append(data)
        self._size_bytes += len(data)
        if self._size_bytes > self._bytes_max:
            raise EventTooLarge(self._bytes_max)


def read_event(event: bytes) -> dict[str, Any] | None:
    """The JSON object of an event; None for anything else (a comment, ``[DONE]``)."""
    if not event.startswith(b"data:"):
        return None
    body = parsed(event[5:])
    return body if isinstance(body, dict) else None


def write_event(body: dict[str, Any]) -> bytes:
    """One event with its blank line."""
    return b"data: " + orjson.dumps(body) + b"\n\n"
