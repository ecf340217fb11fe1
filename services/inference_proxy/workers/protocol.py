"""The server's side of a connection, which goes to another worker when its next request is there.

The connection itself moves, with what was read of the request: the other worker answers the client
directly, sees it leave, and keeps the connection. A client that stays with one session moves once.
"""

from typing import Any, Final

import httptools

from services.inference_proxy.workers.parcels import Outbox, Parcel
from services.inference_proxy.workers.places import place_of_head
from services.kit.heads import HEAD_BYTES_MAX
from services.kit.server import CallerProtocol

HEAD_END: Final = b"\r\n\r\n"
EMPTY_LINES: Final = b"\r\n"  # that clients may send before a request


class WorkerProtocol(CallerProtocol):
    """One connection. ``outboxes`` are those of all workers, of which ``index`` is this one."""

    outboxes: tuple[Outbox, ...]
    index: int

    def __init__(self, *, handed: bytes = b"", **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._handed = handed  # what another worker has read of the first request
        self._head = b""  # of a request whose head is not whole yet
        self._reading: httptools.HttpRequestParser | None = None  # has read just that

    def connection_made(self, transport: Any) -> None:
        """It begins, or goes on here."""
        super().connection_made(transport)
        if self._handed:
            handed, self._handed = self._handed, b""
            super().data_received(handed)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request: of its begin, or of one that is served here."""
        is_free = self._is_between and (self.cycle is None or self.cycle.response_complete)
        if self.is_refused or not is_free:
            super().data_received(data)
            return
        news = data
        data = (self._head + data).lstrip(EMPTY_LINES)
        end = data.find(HEAD_END)
        if end < 0 and self._may_become_a_head(news):
            self._head = data
            self._unset_keepalive_if_required()
            if len(data) > HEAD_BYTES_MAX:
                self.refuse_head()
            return
        self._head, self._reading = b"", None
        worker = None if end < 0 else place_of_head(data[:end], len(self.outboxes))
        if worker is None or worker == self.index or not self._hand_over(worker, data):
            super().data_received(data)

    def _may_become_a_head(self, news: bytes) -> bool:
        """Whether more is worth waiting for: what no request begins with is refused at once."""
        if self._reading is None:
            self._reading = httptools.HttpRequestParser(object())
        try:
            self._reading.feed_data(news)
        except httptools.HttpParserError:
            return False
        return True

    def _target(self) -> bytes:
        """What the request that is read asks for, as far as it came."""
        words = self._head.split(b" ", 2)
        return words[1] if len(words) > 1 else super()._target()

    def _hand_over(self, worker: int, data: bytes) -> bool:
        """Whether it went: not while bytes of an answer wait for the client."""
        transport = self.transport
        if transport.is_closing() or transport.get_write_buffer_size():
            return False
        descriptor = transport.get_extra_info("socket").fileno()
        self.outboxes[worker].post(Parcel.connection(descriptor, data))
        transport.abort()  # closes our descriptor; the connection lives on in the other
        return True


def protocol_of(outboxes: tuple[Outbox, ...], index: int) -> type[WorkerProtocol]:
    """The protocol of the connections of worker ``index``."""

    class Protocol(WorkerProtocol):
        pass

    Protocol.outboxes, Protocol.index = outboxes, index
    return Protocol
