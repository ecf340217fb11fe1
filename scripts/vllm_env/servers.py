"""Real vLLM servers: started, waited for, killed as a whole, their logs kept."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import httpx

from scripts.vllm_env.build import Line, model_folder

BASE = Path(__file__).parents[2] / ".vllm"
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 15.0
CAPTURE = {
    "0.30": ("--enable-return-routed-experts",),
    "0.32": (
        "--enable-return-routed-experts",
        "--return-sampling-mask",
        "--logprobs-mode",
        "processed_logprobs",
    ),
}
# One step of 32 tokens per block; the pair needs equal sizes on both sides.
CACHE = {"0.30": (), "0.32": ("--block-size", "32", "--kv-cache-memory-bytes", "33554432")}


class ServerDied(Exception):
    """It ended, or did not start in time; the message is the end of its log."""


def why_not(line: Line) -> str | None:
    """Why there is no environment of this line here; None when there is one."""
    folder = BASE / line
    if (folder / "why-not").is_file():
        return f"vLLM {line} cannot be built here: {(folder / 'why-not').read_text()[:300]}"
    if not (folder / "serve.sh").is_file():
        return f"vLLM {line} was not built: make test-vllm does it"
    return None


@dataclass
class VllmServer:
    """One running server. ``process`` leads a group that holds all of its processes."""

    line: Line
    url: str
    log_path: Path
    process: subprocess.Popen[bytes]
    started_s: float = field(default_factory=time.monotonic)

    @property
    def port(self) -> int:
        """Where it listens on this machine."""
        return int(self.url.rpartition(":")[2])

    def log(self) -> str:
        """Everything that it has said."""
        return self.log_path.read_text(errors="replace")

    def metric(self, name: str, label: str = "") -> float:
        """The sum of one of its metrics over all labels, or over those that hold ``label``."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        found = [
            line.rpartition(" ")[2] for line in lines if line.startswith(name) and label in line
        ]
        return sum(map(float, found))

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Signal the whole group; nothing when it has gone."""
        try:
            os.killpg(self.process.pid, signal_number)
        except ProcessLookupError:
            return

    def stop(self) -> None:
        """Ask it to end, then make it."""
        self.kill(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
            self.process.wait(STOP_TIMEOUT_S)


def start(
    line: Line,
    log_path: Path,
    *flags: str,
    root: Path | None = None,
    captures: bool = True,
    seed: int = 0,
    variables: dict[str, str] | None = None,
) -> VllmServer:
    """A server that is still starting."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"VLLM_SERVER_DEV_MODE": "1", **(variables or {})}
    if root is not None:
        environment["SIDEBAND_VLLM_PAYLOAD_ROOT"] = str(root)
    wanted = [*(CAPTURE[line] if captures else ()), *CACHE[line], *flags]
    command = [str(BASE / line / "serve.sh"), str(port), str(model_folder(BASE, seed)), *wanted]
    log_path.parent.mkdir(parents=True, exist_ok=True)
    # A group, to signal all of it at once, but no session: Linux shares processors among sessions
    # first, and a session whose workers spin can keep a whole other one waiting for seconds.
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0
        )
    return VllmServer(line, f"http://127.0.0.1:{port}", log_path, process)


def wait_ready(servers: Sequence[VllmServer]) -> None:
    """Until all of them answer. Raises ServerDied."""
    pause = Event()  # nobody sets it: a wait with a deadline
    for server in servers:
        while not _is_healthy(server):
            waited_s = time.monotonic() - server.started_s
            if server.process.poll() is not None or waited_s > START_TIMEOUT_S:
                raise ServerDied(f"after {waited_s:.0f} s: {server.log()[-3000:]}")
            pause.wait(0.25)


def _is_healthy(server: VllmServer) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def running(*servers: VllmServer) -> Iterator[tuple[VllmServer, ...]]:
    """The servers, once they are ready, until the block is left."""
    try:
        wait_ready(servers)
        yield servers
    finally:
        for server in servers:
            server.kill(signal.SIGTERM)
        for server in servers:
            server.stop()
