"""Processes of a simulated cluster: forked off one that has everything imported, watched, ended.

A start costs a fork instead of an interpreter and its imports. The parent asks each service until
it is ready and reads its peak memory while it lives.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Final

import httpx

from simulation.memory import peak_bytes, resident_bytes

# Besides all services: what their server and clients import late. A missing one is no error.
PRELOADED: Final = (
    "simulation.targets",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.websockets_sansio_impl",
    "anyio._backends._asyncio",
    "httpcore",
    "certifi",
    "encodings.idna",
)
READY_POLL_S: Final = 0.05
READY_TIMEOUT_S: Final = 60.0  # a busy machine with two cores, many starts at once
STOP_TIMEOUT_S: Final = 10.0


class ProcessFailed(Exception):
    """A process of the cluster ended by itself, or never became ready."""

    def __init__(self, name: str, reason: str, log: Path) -> None:
        tail = ""
        with contextlib.suppress(OSError):
            tail = log.read_text(errors="replace")[-2000:]
        super().__init__(f"{name} {reason}\n{tail}".strip())


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """One process of the cluster."""

    name: str
    process: ForkServerProcess
    log: Path
    idle_bytes: int = 0  # resident when it became ready
    is_ending: bool = False  # it was asked to

    def grown_bytes(self) -> int:
        """Peak resident memory beyond that at readiness; 0 once it is gone."""
        return max(0, peak_bytes(self.process.pid or 0) - self.idle_bytes)


class Cluster:
    """Starts and ends processes. Use as a context manager: nothing outlives it."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._context = context()
        self.running: list[Running] = []
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, target: Callable[..., None], *args: Any) -> Running:
        """Start ``target(*args)`` as a process; its output goes to a log of its own."""
        log = self._logs / f"{name}.log"
        process = self._context.Process(
            target=_logged, args=(str(log), target, args), name=name, daemon=True
        )
        process.start()
        running = Running(name=name, process=process, log=log)
        self.running.append(running)
        return running

    async def ready(self, running: Running, url: str, client: httpx.AsyncClient) -> None:
        """Wait until ``url`` answers 200. Raises ProcessFailed."""
        deadline_s = asyncio.get_running_loop().time() + READY_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline_s:
            self.check(running)
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(url)).status_code == 200:
                    running.idle_bytes = resident_bytes(running.process.pid or 0)
                    return
            await asyncio.sleep(READY_POLL_S)
        raise ProcessFailed(running.name, f"was not ready within {READY_TIMEOUT_S} s", running.log)

    def check(self, *some: Running) -> None:
        """Raises ProcessFailed when one (by default any) has ended with an error."""
        for running in some or tuple(self.running):
            if not running.is_ending and running.process.exitcode not in (None, 0):
                reason = f"ended with {running.process.exitcode}"
                raise ProcessFailed(running.name, reason, running.log)

    async def finished(self, some: list[Running], *, timeout_s: float) -> None:
        """Wait until all of ``some`` ended by themselves. Raises ProcessFailed."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while any(running.process.is_alive() for running in some):
            self.check(*some)
            if asyncio.get_running_loop().time() > deadline_s:
                late = next(running for running in some if running.process.is_alive())
                raise ProcessFailed(late.name, f"did not end within {timeout_s} s", late.log)
            await asyncio.sleep(READY_POLL_S)
        self.check(*some)

    async def end(self, *some: Running) -> None:
        """Ask services to end and wait until they have. Raises ProcessFailed.

        Polled, never joined in a thread: the exit code comes through a pipe that only one reader
        may read, and every start of a process reads it too.
        """
        for running in some:
            running.is_ending = True
            running.process.terminate()
        deadline_s = asyncio.get_running_loop().time() + STOP_TIMEOUT_S
        while any(running.process.is_alive() for running in some):
            if asyncio.get_running_loop().time() > deadline_s:
                late = next(running for running in some if running.process.is_alive())
                raise ProcessFailed(late.name, f"did not end in {STOP_TIMEOUT_S} s", late.log)
            await asyncio.sleep(READY_POLL_S)
        for running in some:
            # A server that shut down in order dies of the same signal at last.
            if running.process.exitcode not in (0, -signal.SIGTERM):
                reason = f"ended with {running.process.exitcode}"
                raise ProcessFailed(running.name, reason, running.log)
        self.forget(*some)

    async def kill(self, running: Running) -> None:
        """SIGKILL: it gets no chance to put anything in order."""
        running.is_ending = True
        running.process.kill()
        while running.process.is_alive():  # noqa: ASYNC110 - SIGKILL cannot be refused
            await asyncio.sleep(0.005)
        self.forget(running)

    def forget(self, *some: Running) -> None:
        """Give back what is left of processes that have ended."""
        for running in some:
            running.process.join()
            running.process.close()
            self.running.remove(running)

    def stop(self) -> None:
        """End all that still run: asked first, killed after a deadline. Blocks."""
        for running in self.running:
            if running.process.is_alive():
                running.process.terminate()
        for running in self.running:
            running.process.join(STOP_TIMEOUT_S)
            if running.process.is_alive():
                running.process.kill()
                running.process.join()
            running.process.close()
        self.running.clear()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def context() -> ForkServerContext:
    """The one context, with everything imported before the first fork."""
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(list(PRELOADED))
    return chosen


def _logged(log: str, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Run in the child: both outputs into the log, then the work."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    target(*args)


@contextlib.contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """Ports that nothing listens on, held until the block is left."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def pick_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with free_ports(count) as ports:
        return ports
