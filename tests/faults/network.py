"""A TCP link with faults between two parts: in a thread of its own, for ZMQ and HTTP alike.

split: bytes go on one to three at a time; delay: a pause before they go on; reset: both ends get an
RST; half_open: one end hears nothing more, though its connection stays up; refuse: a new
connection is closed at once.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from tests.faults.seeds import Chance

WAIT_S = 10.0
CHUNK_BYTES = 1 << 14
DELAY_S = 0.02
RESET_S = 0.05
Pair = tuple[asyncio.StreamWriter, asyncio.StreamWriter]


@dataclass(eq=False)
class FaultyLink:
    """Listens on ``port`` and forwards to ``target_port``; rates are per chunk of bytes."""

    chance: Chance
    target_port: int
    rates: Mapping[str, float]
    port: int = 0
    pairs: set[Pair] = field(default_factory=set)
    is_split: bool = False  # both sides hear nothing of each other

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.port = self._started.result(WAIT_S)

    @property
    def endpoint(self) -> str:
        """For ZMQ."""
        return f"tcp://127.0.0.1:{self.port}"

    def split(self) -> None:
        """Silence on all connections, old and new, until ``heal``."""
        self.is_split = True

    def heal(self) -> None:
        """The split ends: connections that it hit are reset, as peers' keep-alives would do."""
        self.is_split = False
        self._loop.call_soon_threadsafe(self._reset_all)

    def calm(self) -> None:
        """No faults from here on; connections that hang are reset."""
        self.chance.calm()
        self.heal()

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        stop = asyncio.create_task(self._stop.wait())
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            self._started.set_result(listener.getsockname()[1])
            while not stop.done():
                accepted = self._start(self._accept(listener))
                await asyncio.wait((stop, accepted), return_when=asyncio.FIRST_COMPLETED)
                accepted.cancel()  # nothing, if it has one
        while self._tasks:
            self._reset_all()
            await asyncio.wait(self._tasks, timeout=RESET_S)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        """One connection, and a task that has it."""
        connection, _ = await self._loop.sock_accept(listener)
        self._start(self._handle(connection))

    async def _handle(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            if not self.chance.strikes("refuse", self.rates.get("refuse", 0.0)):
                with contextlib.suppress(OSError):
                    await self._connect(reader, writer)
        finally:
            reset(writer)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        pair = (writer, other_writer)
        self.pairs.add(pair)
        ways = [
            asyncio.create_task(self._forward(reader, other_writer)),
            asyncio.create_task(self._forward(other_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in pair:
                reset(end)
            self.pairs.discard(pair)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            if self._strikes("reset"):
                return
            if self._strikes("half_open") or self.is_split:
                await self._stop.wait()  # or until the other way ends by the reset of the pair
                return
            if self._strikes("delay"):
                await asyncio.sleep(DELAY_S)
            size = len(chunk)
            if self._strikes("split"):
                size = self.chance.rng.randint(1, 3)
            for start in range(0, min(len(chunk), 64 * size), size):
                writer.write(chunk[start : start + size])
                await writer.drain()
            writer.write(chunk[64 * size :])  # the rest at once: a split must not last for ever
            await writer.drain()

    def _strikes(self, kind: str) -> bool:
        return self.chance.strikes(kind, self.rates.get(kind, 0.0))

    def _reset_all(self) -> None:
        for pair in list(self.pairs):
            for end in pair:
                reset(end)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with an RST: what was on its way is lost."""
    found = writer.get_extra_info("socket")
    if found is not None:
        with contextlib.suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.contextmanager
def faulty_link(
    chance: Chance, target_port: int, rates: Mapping[str, float]
) -> Iterator[FaultyLink]:
    """A link that is closed on the way out."""
    link = FaultyLink(chance, target_port, rates)
    try:
        yield link
    finally:
        link.close()
