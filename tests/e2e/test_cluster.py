"""Processes of the simulated cluster: a dead one is named, and none outlives the run."""

import asyncio
import signal
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from simulation import processes
from simulation.processes import Cluster, ProcessFailed, Running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def says_and_fails(words: str) -> None:
    sys.stderr.write(words)
    raise SystemExit(3)


def waits() -> None:
    signal.sigwait({signal.SIGTERM})


def ignores_every_request_to_end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdout.write("deaf\n")
    sys.stdout.flush()
    while True:
        signal.pause()


async def until_deaf(running: Running) -> None:
    """Its signal handler is in place once it has said so."""
    for _ in range(3000):
        if running.log.exists() and "deaf" in running.log.read_text():
            return
        await asyncio.sleep(0.02)
    pytest.fail("the process never said that it ignores signals")


async def test_a_process_that_dies_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        running = cluster.start("rank7", says_and_fails, "disk on fire")
        with pytest.raises(ProcessFailed, match=r"(?s)rank7 ended with 3.*disk on fire"):
            await cluster.finished([running], timeout_s=60)


async def test_waiting_for_a_dead_service_to_be_ready_ends_at_once(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        running = cluster.start("proxy", says_and_fails, "port in use")
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(ProcessFailed, match=r"(?s)proxy ended with 3.*port in use"):
                await cluster.ready(running, "http://127.0.0.1:9/readyz", client)


async def test_every_wait_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "READY_TIMEOUT_S", 0.2)
    with Cluster(tmp_path) as cluster:
        running = cluster.start("slow", waits)
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(ProcessFailed, match="was not ready within"):
                await cluster.ready(running, "http://127.0.0.1:9/readyz", client)
        with pytest.raises(ProcessFailed, match="did not end within"):
            await cluster.finished([running], timeout_s=0.2)


async def test_no_process_outlives_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.3)
    with Cluster(tmp_path) as cluster:
        started = [
            cluster.start("waits", waits),
            cluster.start("deaf", ignores_every_request_to_end),
        ]
        await until_deaf(started[1])
        pids = [running.process.pid or 0 for running in started]
        with pytest.raises(ProcessFailed, match=r"deaf did not end in 0\.3 s"):
            await cluster.end(started[1])
    assert cluster.running == []
    assert not any(psutil.pid_exists(pid) for pid in pids)
