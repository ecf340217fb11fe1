"""Real orchestrators as processes: started, asked, stopped in every way."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import httpx

from bench.http.processes import free_port

ROOT = Path(__file__).parent.parent.parent
START_TIMEOUT_S = 40.0


@dataclass
class Orchestrator:
    """One process and its address."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: Path

    def ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        """One request; never retried."""
        with httpx.Client(trust_env=False, timeout=10) as client:
            return client.request(method, self.url + path, json=body)

    def lease(self, name: str) -> httpx.Response:
        """A lease for a rollout that is a group by itself."""
        body = {"rollout_id": name, "group_id": name, "group_size": 1}
        return self.ask("POST", "/v1/leases", body)

    def deliver(self, name: str) -> httpx.Response:
        """A rollout without rows."""
        turn = {
            "request_id": f"{name}.t0",
            "prompt_token_ids": [1, 2],
            "completion_token_ids": [3],
            "logprobs": [-0.5],
        }
        body = {"rollout_id": name, "status": "completed", "reward": 1.0, "turns": [turn]}
        return self.ask("POST", "/v1/rollouts", body)

    def is_ready(self) -> bool:
        """Whether it leads and gives leases."""
        with contextlib.suppress(httpx.TransportError):
            return self.ask("GET", "/readyz").status_code == 200
        return False

    def is_alive(self) -> bool:
        """Whether it answers at all."""
        with contextlib.suppress(httpx.TransportError):
            return self.ask("GET", "/healthz").status_code == 200
        return False

    def signal(self, number: signal.Signals) -> None:
        """Stop it, let it go on, or kill it."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(timeout=10)


@contextlib.contextmanager
def orchestrator(
    folder: Path, ledger_url: str, *, run_id: str = "run", **settings: object
) -> Iterator[Orchestrator]:
    """A process on a ledger; killed at the end if it still lives. Not waited for."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    chosen = {
        "port": port,
        "run_id": run_id,
        "ledger_url": ledger_url,
        "ledger_lease_s": 2.0,
        "instance_name": url,
        "initial_policy_version": 0,
        "payload_root": folder / "payloads",
        "step_rollouts": 1000,
        **settings,
    }
    environment = {
        f"SIDEBAND_ORCHESTRATOR_{name.upper()}": str(value) for name, value in chosen.items()
    }
    log = folder / f"orchestrator-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.orchestrator"],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'shared'}:{ROOT}", **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
    try:
        yield Orchestrator(process, url, log)
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(timeout=10)


def until(holds: Callable[[], bool], what: str, *, timeout_s: float = START_TIMEOUT_S) -> None:
    """Wait for it, or fail."""
    pause, deadline_s = Event(), time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        pause.wait(0.05)
