"""What workers send each other: open sockets, over socket pairs that their parent made.

Each process has one inbox. Its ends outlive it, since the parent keeps them: what was sent to a
worker that died waits for the next one. Nothing is bound in a file system, and nobody but the
parent and its workers can reach any of it.
"""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

INLINE_BYTES_MAX: Final = 32 << 10  # a longer text travels in a file of memory of its own
RECEIVE_BYTES: Final = INLINE_BYTES_MAX + 1
WAITING_MAX: Final = 4096  # parcels for one worker; each holds a descriptor
TAKEN_MAX: Final = 64  # in one turn of the loop, then its other work
SHORT: Final = b"s"
LONG: Final = b"l"
CALL: Final = b"c"
TELL: Final = b"t"  # a call that nothing else may crowd out
STARTED: Final = b"r"  # with the worker's number, as what follows
BEAT: Final = b"b"
_DESCRIPTORS: Final = {SHORT: 1, LONG: 2, CALL: 1, TELL: 1, STARTED: 0, BEAT: 0}

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Parcel:
    """One message and the descriptors that go with it; whoever has it closes them."""

    data: bytes
    descriptors: list[int]

    @classmethod
    def connection(cls, descriptor: int, received: bytes) -> "Parcel":
        """A client's connection, and what was read from it."""
        if len(received) <= INLINE_BYTES_MAX:
            return cls(SHORT + received, [os.dup(descriptor)])
        memory = os.memfd_create("request")
        view = memoryview(received)
        while view:
            view = view[os.write(memory, view) :]
        return cls(LONG, [os.dup(descriptor), memory])

    @property
    def kind(self) -> bytes:
        """The first byte."""
        return self.data[:1]

    @property
    def is_whole(self) -> bool:
        """Whether its descriptors came with it: a process that may open no more gets fewer."""
        return len(self.descriptors) == _DESCRIPTORS[self.kind]

    def received(self) -> bytes:
        """What was read from a connection."""
        if self.kind == SHORT:
            return self.data[1:]
        memory = self.descriptors[1]
        return os.pread(memory, os.fstat(memory).st_size, 0)

    def close(self) -> None:
        """Give the descriptors back."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


@dataclass(frozen=True, slots=True)
class Inbox:
    """The two ends of one process's pair."""

    taking: socket.socket
    sending: socket.socket

    @classmethod
    def create(cls) -> "Inbox":
        """Before any process is forked that shall use it."""
        sending, taking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sending.setblocking(False)
        taking.setblocking(False)
        return cls(taking, sending)

    def take(self) -> Parcel | None:
        """The next parcel that came whole, if there is one."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self.taking, RECEIVE_BYTES, 2, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return None
            parcel = Parcel(data, list(descriptors))
            if parcel.is_whole:
                return parcel
            log.error("parcel_lost", error="no descriptor is free")
            parcel.close()


class Outbox:
    """Sends to one inbox in order; what does not fit waits until it does."""

    def __init__(self, inbox: Inbox) -> None:
        self._socket = inbox.sending
        self._waiting: deque[Parcel] = deque()

    def post(self, parcel: Parcel) -> None:
        """Send it, now or soon. Its descriptors are closed here."""
        if self._waiting or not self._sent(parcel):
            self._wait(parcel)

    def _sent(self, parcel: Parcel) -> bool:
        try:
            socket.send_fds(self._socket, [parcel.data], parcel.descriptors)
        except BlockingIOError:
            return False
        except OSError as exc:  # too many descriptors under way, or no memory
            log.error("parcel_lost", error=str(exc))
        parcel.close()
        return True

    def _wait(self, parcel: Parcel) -> None:
        if len(self._waiting) >= WAITING_MAX:
            log.error("parcel_lost", error=f"{WAITING_MAX} wait already")
            parcel.close()
            return
        if not self._waiting:
            asyncio.get_running_loop().add_writer(self._socket.fileno(), self._flush)
        self._waiting.append(parcel)

    def _flush(self) -> None:
        while self._waiting and self._sent(self._waiting[0]):
            self._waiting.popleft()
        if not self._waiting:
            asyncio.get_running_loop().remove_writer(self._socket.fileno())


def read(inbox: Inbox, take: Callable[[Parcel], None]) -> None:
    """From now on, until ``stop_reading``, give each parcel to ``take``."""

    def ready() -> None:
        for _ in range(TAKEN_MAX):
            parcel = inbox.take()
            if parcel is None:
                return
            take(parcel)

    asyncio.get_running_loop().add_reader(inbox.taking.fileno(), ready)


def stop_reading(inbox: Inbox) -> None:
    """What comes now stays where it is."""
    asyncio.get_running_loop().remove_reader(inbox.taking.fileno())
