"""One worker: the application on its own listening socket, and its inbox."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Final

import structlog
import uvicorn
from starlette.types import ASGIApp

from services.inference_proxy.workers.answering import Answering
from services.inference_proxy.workers.calls import answer
from services.inference_proxy.workers.child import BEAT_S
from services.inference_proxy.workers.guard import Guard
from services.inference_proxy.workers.parcels import (
    BEAT,
    CALL,
    STARTED,
    TELL,
    Inbox,
    Outbox,
    Parcel,
    read,
    stop_reading,
)
from services.inference_proxy.workers.protocol import WorkerProtocol, protocol_of
from services.kit.run import server_options
from services.kit.settings import ServiceSettings

CALLS_MAX: Final = 256  # answered at the same time; clients that ask for turns make as many

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What a worker was given by its parent. ``outboxes`` are the workers', then the parent's."""

    index: int
    inbox: Inbox
    outboxes: tuple[Outbox, ...]
    listener: socket.socket
    lifeline: socket.socket  # ends when the parent does

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.outboxes) - 1


class WorkerServer(uvicorn.Server):
    """Serves what it accepts and what others hand over; ``answering`` is known once it started."""

    def __init__(
        self,
        app: ASGIApp,
        seat: Seat,
        settings: ServiceSettings,
        *,
        answering: Callable[[], Answering],
    ) -> None:
        self._protocol = protocol_of(seat.outboxes[:-1], seat.index)
        guard = Guard(app, index=seat.index, workers=seat.workers)
        super().__init__(uvicorn.Config(guard, http=self._protocol, **server_options(settings)))
        self._seat, self._make_answering = seat, answering
        self._calls: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then take what waits in the inbox."""
        await super().startup(sockets)
        self._answering = self._make_answering()
        asyncio.get_running_loop().add_reader(self._seat.lifeline.fileno(), self._orphaned)
        read(self._seat.inbox, self._take)
        self._tell_parent(STARTED)
        self._own(self._beat())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nothing more from others, then end as a server does."""
        stop_reading(self._seat.inbox)
        await super().shutdown(sockets)
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def end(self) -> None:
        """Shut down in order."""
        self.should_exit = True

    def _tell_parent(self, kind: bytes) -> None:
        self._seat.outboxes[-1].post(Parcel(kind + bytes([self._seat.index]), []))

    async def _beat(self) -> None:
        """Say that the loop runs, until cancelled."""
        while True:
            self._tell_parent(BEAT)
            await asyncio.sleep(BEAT_S)

    def _take(self, parcel: Parcel) -> None:
        if parcel.kind not in (CALL, TELL):
            self._own(self._connected(parcel))
        elif parcel.kind == TELL or len(self._calls) < CALLS_MAX:
            self._own(answer(parcel.descriptors[0], self._answering))
        else:
            parcel.close()

    def _own(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._calls.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("parcel_failed", exc_info=task.exception())

    async def _connected(self, parcel: Parcel) -> None:
        """Go on with a connection that another worker handed over."""
        received = parcel.received()
        client = socket.socket(fileno=parcel.descriptors.pop(0))
        parcel.close()
        client.setblocking(False)

        def protocol() -> WorkerProtocol:
            return self._protocol(
                handed=received,
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            )

        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, client)
        except OSError as exc:  # the client has left meanwhile
            client.close()
            log.info("handed_connection_lost", error=str(exc))

    def _orphaned(self) -> None:
        asyncio.get_running_loop().remove_reader(self._seat.lifeline.fileno())
        log.error("parent_ended")
        self.end()
