"""Moves heavy pure work (JSON and base64 of large answers) off the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from services.inference_proxy.limits import OFFLOAD_BYTES_MIN

T = TypeVar("T")


async def offload(work: Callable[[], T], *, size_bytes: int) -> T:
    """The result of ``work``: in a thread when it handles much, else at once."""
    if size_bytes < OFFLOAD_BYTES_MIN:
        return work()
    return await asyncio.to_thread(work)
