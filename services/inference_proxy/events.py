"""Server-sent events as vLLM sends them: split a byte stream, read an event, write one. Pure."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from services.inference_proxy.limits import EVENT_BESIDE_BYTES_MAX
from services.inference_proxy.long_json import Parts, dump_long, read_long, size_of
from services.inference_proxy.upstream import parsed

EVENT_STREAM: Final = "text/event-stream"
JOINED_BYTES_MAX: Final = 1 << 20  # of an event handled as one; a larger one has the seam in it
_BLANK: Final = re.compile(rb"\r?\n\r?\n")
_FIELD: Final = b"data:"
_END: Final = b"[DONE]"
DONE: Final = _FIELD + b" " + _END


class EventTooLarge(Exception):
    """An event outgrew its bound before it ended."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(f"an event has more than {bytes_max} bytes")


class EventSplitter:
    """Cuts a byte stream into whole events, each without its blank line.

    A large event stays in the parts in which it came, perhaps with a line's end; a small one has
    one part.
    """

    def __init__(self, *, bytes_max: int) -> None:
        self._parts: list[bytes] = []
        self._seam = b""  # the last three bytes: a blank line may lie across reads
        self._size_bytes, self._bytes_max = 0, bytes_max

    def feed(self, data: bytes) -> Iterator[Parts]:
        """Events that ``data`` completes. Raises EventTooLarge."""
        seen = self._seam + data
        self._seam = seen[-3:]
        if b"\n\n" not in seen and b"\n\r\n" not in seen:
            self._keep(data)
            return
        if self._size_bytes > JOINED_BYTES_MAX:
            stop = _BLANK.search(seen)
            assert stop is not None, "it was seen"
            begun_bytes = len(seen) - len(data)
            yield self._taken(data[: max(0, stop.start() - begun_bytes)])
            data = data[max(0, stop.end() - begun_bytes) :]
        whole = b"".join(self._parts) + data
        *events, rest = whole.replace(b"\r\n", b"\n").split(b"\n\n")
        self._parts, self._size_bytes = [], 0
        if rest:
            self._keep(rest)
        yield from ((event,) for event in events if event.strip())

    def rest(self) -> Parts:
        """What is left when the stream ends without a blank line; nothing of an empty one."""
        if self._size_bytes > JOINED_BYTES_MAX:
            return self._taken(b"")
        whole = b"".join(self._taken(b"")).strip()
        return (whole,) if whole else ()

    def _taken(self, last: bytes) -> Parts:
        first, *others = (*self._parts, last)
        self._parts, self._size_bytes = [], 0
        while others and len(first) < len(DONE):  # what an event is shows in its first part
            first += others.pop(0)
        return (first, *others)

    def _keep(self, data: bytes) -> None:
        self._parts.append(data)
        self._size_bytes += len(data)
        if self._size_bytes > self._bytes_max:
            raise EventTooLarge(self._bytes_max)


def data_of(event: Parts) -> Parts | None:
    """What its data lines say, in the parts in which it came if it is one line; None for an event
    without (a comment).
    """
    first, *others = event
    if first.startswith(_FIELD) and (_is_one_line(event) if others else b"\n" not in first):
        return (first[len(_FIELD) :], *others)
    lines = b"".join(event).split(b"\n")
    data = [line.removeprefix(_FIELD) for line in lines if line.startswith(_FIELD)]
    return (b"\n".join(data),) if data else None


def is_end(data: Parts) -> bool:
    """Whether it says that nothing follows."""
    return b"".join(data).strip() == _END


def read_event(event: Parts) -> dict[str, Any] | None:
    """The JSON object of an event; None for anything else (a comment, ``[DONE]``).

    Raises TooMuchBeside.
    """
    data = data_of(event)
    if data is None:
        return None
    if len(data) == 1 and len(data[0]) <= JOINED_BYTES_MAX:
        body = parsed(data[0])
    else:
        body = read_long(data, parsed, beside_bytes_max=EVENT_BESIDE_BYTES_MAX)
    return body if isinstance(body, dict) else None


def _is_one_line(event: Parts) -> bool:
    """Whether only the end of a line may follow the first one."""
    has_ended = False
    for part in event:
        if has_ended and part.strip():
            return False
        end = part.find(b"\n")
        if end >= 0 and part[end:].strip():
            return False
        has_ended = has_ended or end >= 0
    return True


def write_event(body: dict[str, Any]) -> Parts:
    """One event with its blank line."""
    first, *others = dump_long(body)
    if not others:
        return (b"data: " + first + b"\n\n",)
    return (b"data: ", first, *others, b"\n\n")


def joined_if_small(parts: Sequence[bytes]) -> Sequence[bytes]:
    """What is sent at a time."""
    if len(parts) > 1 and size_of(parts) <= JOINED_BYTES_MAX:
        return (b"".join(parts),)
    return parts
