"""Server processes for a row: started, waited for, ended."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http import HTTPStatus
from http.client import HTTPConnection
from threading import Event
from typing import Final

START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 10.0
_CPUCLOCK_SCHED: Final = 2  # the kernel's number of the clock of all threads of a process


class ServerDied(RuntimeError):
    """A server ended before it listened."""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(
    arguments: Sequence[str], port: int, *, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """``python <arguments>`` until the block is left; yields its pid once ``port`` answers."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _wait_for(process, port)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _wait_for(process: "subprocess.Popen[bytes]", port: int) -> None:
    pause, deadline = Event(), time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            assert process.stderr is not None
            raise ServerDied(process.stderr.read().decode()[-2000:])
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        pause.wait(0.05)
    raise ServerDied(f"nothing listens on {port} after {START_TIMEOUT_S} s")


def wait_until_ready(port: int) -> None:
    """Until a service says that it can do its work. Raises ServerDied."""
    pause, deadline = Event(), time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        asked = HTTPConnection("127.0.0.1", port, timeout=START_TIMEOUT_S)
        with closing(asked):
            asked.request("GET", "/readyz")
            if asked.getresponse().status == HTTPStatus.OK:
                return
        pause.wait(0.05)
    raise ServerDied(f"the service on {port} is not ready after {START_TIMEOUT_S} s")


def family(pid: int) -> list[int]:
    """A running process and those that it has forked."""
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return [pid, *map(int, children.read().split())]


def peak_bytes(pid: int) -> int:
    """The high-water mark of a running process."""
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise ServerDied(f"process {pid} is gone")


def processor_s(pid: int) -> float:
    """Processor time of a running process so far, its ended threads too, user and system.

    By the clock that ``clock_getcpuclockid(3)`` names: nanoseconds, where ``/proc`` counts
    hundredths of a second and a short run has none. Raises OSError when the process is gone.
    """
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
