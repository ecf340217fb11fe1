"""One worker asks another: a socket pair of its own for each call, which travels as a parcel.

A call to a worker that died waits in its inbox for the next one, as long as its deadline allows.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import msgspec
import structlog

from services.inference_proxy.workers.asks import ASKS, REPLIES, Adopt, AnyAsk, AnyReply
from services.inference_proxy.workers.errors import WorkerSilent
from services.inference_proxy.workers.parcels import CALL, TELL, Outbox, Parcel

ASKED_BYTES_MAX: Final = 1 << 20  # a few names and a state; the answer may be large
ASK_TIMEOUT_S: Final = 5.0  # a worker that begins anew answers within it

R = TypeVar("R")

log = structlog.get_logger(__name__)


class Calls:
    """Asks the workers behind ``outboxes``, the parent last."""

    def __init__(self, outboxes: Sequence[Outbox]) -> None:
        self._outboxes = outboxes

    async def ask(
        self, index: int, ask: AnyAsk, kind: type[R], *, timeout_s: float = ASK_TIMEOUT_S
    ) -> R:
        """Its reply, of ``kind``. Raises WorkerSilent, also when it died while it answered."""
        reply = await self.ask_any(index, ask, timeout_s=timeout_s)
        assert isinstance(reply, kind), f"{type(ask).__name__} got {type(reply).__name__}"
        return reply

    async def ask_any(
        self, index: int, ask: AnyAsk, *, timeout_s: float = ASK_TIMEOUT_S
    ) -> AnyReply:
        """The same when there are several kinds."""
        ours, theirs = socket.socketpair()
        kind = TELL if isinstance(ask, Adopt) else CALL
        self._outboxes[index].post(Parcel(kind, [theirs.detach()]))
        try:
            async with asyncio.timeout(timeout_s):
                content = await _asked(ours, msgspec.msgpack.encode(ask))
        except TimeoutError as exc:
            raise WorkerSilent(index, f"did not answer within {timeout_s:g} s") from exc
        except OSError as exc:
            raise WorkerSilent(index, f"broke off: {exc}") from exc
        try:
            return REPLIES.decode(content)
        except msgspec.DecodeError as exc:
            raise WorkerSilent(index, "ended before it had answered") from exc


async def _asked(ours: socket.socket, content: bytes) -> bytes:
    ours.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    try:
        writer.write(content)
        writer.write_eof()
        await writer.drain()
        return await reader.read()
    finally:
        writer.close()


async def answer(descriptor: int, handle: Callable[[AnyAsk], Awaitable[AnyReply]]) -> None:
    """Read one call and answer it. A caller that waits no longer is no fault."""
    theirs = socket.socket(fileno=descriptor)
    theirs.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            asked = await reader.read(ASKED_BYTES_MAX)
            while part := await reader.read(ASKED_BYTES_MAX):
                asked += part
        try:
            ask = ASKS.decode(asked)
        except msgspec.DecodeError as exc:  # who asked has died meanwhile
            log.warning("ask_lost", error=str(exc))
            return
        reply = await handle(ask)
        writer.write(msgspec.msgpack.encode(reply))
        with contextlib.suppress(OSError):
            await writer.drain()
    finally:
        writer.close()
