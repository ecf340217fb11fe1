"""A request's body, read before whoever answers it looks."""

import asyncio
from typing import Final

from starlette.types import Message, Receive

JOINED_BYTES_MAX: Final = 1 << 20  # on the loop; a larger body is joined in a thread


async def read_body(receive: Receive, *, bytes_max: int) -> tuple[list[Message], bytes | None]:
    """What came, and the body when it came whole and has at most ``bytes_max``."""
    messages: list[Message] = []
    size_bytes = 0
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request":
            return messages, None
        size_bytes += len(message.get("body", b""))
        if size_bytes > bytes_max:
            return messages, None
        if not message.get("more_body", False):
            parts = [message.get("body", b"") for message in messages]
            if size_bytes <= JOINED_BYTES_MAX:
                return messages, b"".join(parts)
            return messages, await asyncio.to_thread(b"".join, parts)


def replayed(messages: list[Message], receive: Receive) -> Receive:
    """``receive`` before ``messages`` came from it."""
    due = iter(messages)

    async def again() -> Message:
        message = next(due, None)
        return await receive() if message is None else message

    return again
