"""Background work is owned, and its end never goes unnoticed."""

import asyncio
import os
import sys
from pathlib import Path

import orjson
import pytest

from bench.http.processes import free_port
from services.kit.background import CRASHED, Crash, background
from tests.services.inference_proxy.harness import until
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.workers import rollout, session_of, workers

ROOT = Path(__file__).parent.parent.parent.parent
# A service as it is, but for one loop that breaks once a file is there.
BROKEN = """
import asyncio, importlib, os, runpy

async def broken(*_):
    while not os.path.exists({file!r}):
        await asyncio.sleep(0.05)
    raise RuntimeError("a bug of ours")

owner, _, name = {loop!r}.rpartition(":")
module, _, kind = owner.partition("/")
held = importlib.import_module(module)
held = getattr(held, kind) if kind else held
setattr(held, name, broken)
runpy.run_module("services.{service}", run_name="__main__")
"""


class Bug(Exception):
    pass


class Over(Exception):
    pass


async def breaking(when: asyncio.Event, error: Exception) -> None:
    await when.wait()
    raise error


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_work_that_breaks_crashes_once_and_ends_the_rest() -> None:
    crash, when, others = Crash(), asyncio.Event(), list[str]()
    ends: list[str] = []
    crash.ends(lambda: ends.append("end"))

    async def other() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            others.append("ended")

    async with background([other(), breaking(when, Bug()), other()], crash=crash):
        await settled()
        assert crash.reasons == []
        when.set()
        await settled()
        assert (crash.reasons, ends, others) == ([CRASHED], ["end"], ["ended"] * 2)
    assert ends == ["end"]


async def test_work_that_is_done_or_told_to_stop_is_no_crash() -> None:
    crash = Crash()

    async def done() -> None:
        await asyncio.sleep(0)

    async with background([done(), asyncio.Event().wait()], crash=crash):  # type: ignore[list-item]
        await settled()
    async with background([], crash=crash):
        await settled()
    assert not crash.has_happened


@pytest.mark.parametrize(("error", "has_crashed"), [(Over(), False), (Bug(), True)])
async def test_an_error_by_which_work_ends_in_order_is_no_crash(
    error: Exception, has_crashed: bool
) -> None:
    crash, when = Crash(), asyncio.Event()
    async with background([breaking(when, error)], crash=crash, ends_by=(Over,)):
        when.set()
        await settled()
        assert crash.has_happened is has_crashed


async def test_what_breaks_before_it_has_begun_ends_the_start() -> None:
    crash, begun, when = Crash(), asyncio.Event(), asyncio.Event()
    when.set()
    with pytest.raises(Bug):
        async with background([breaking(when, Bug())], crash=crash, begun=begun):
            raise AssertionError("entered")
    assert not crash.has_happened


async def test_what_breaks_after_it_has_begun_crashes() -> None:
    crash, begun, when = Crash(), asyncio.Event(), asyncio.Event()
    begun.set()
    async with background([breaking(when, Bug())], crash=crash, begun=begun):
        when.set()
        await settled()
        assert crash.has_happened


def test_who_asks_late_how_to_end_is_told_at_once() -> None:
    crash, ends = Crash(), list[str]()
    crash()
    crash.ends(lambda: ends.append("end"))
    assert ends == ["end"]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("service", "loop", "settings"),
    [
        ("inference_proxy", "services.inference_proxy.keeping/Keeper:run", {}),
        ("trainer_feed", "services.trainer_feed.app:watch_loop", {"FEED_RUN_ID": "run-1"}),
        ("orchestrator", "services.orchestrator.loops:keep_time", {}),
        ("orchestrator", "services.orchestrator.loops:keep_leading", {"ledger": "in the root"}),
    ],
)
async def test_a_service_whose_background_task_breaks_ends_by_name_and_with_a_status(
    tmp_path: Path, service: str, loop: str, settings: dict[str, str]
) -> None:
    prefix = {"inference_proxy": "PROXY", "trainer_feed": "FEED", "orchestrator": "ORCHESTRATOR"}
    named = {
        f"{prefix[service]}_PORT": str(free_port()),
        "FEED_ENDPOINT": f"tcp://127.0.0.1:{free_port()}",
        **settings,
    }
    if named.pop("ledger", None) is not None:
        config = ROOT / "tests" / "data" / "vllm" / "tiny-moe.config.json"
        named |= {
            "ORCHESTRATOR_PAYLOAD_ROOT": str(tmp_path / "root"),
            "ORCHESTRATOR_MODEL_CONFIG_PATH": str(config),
        }
    file = tmp_path / "break"
    file.touch()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        BROKEN.format(service=service, loop=loop, file=str(file)),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            **{
                f"SIDEBAND_{name}": value
                for name, value in named.items()
                if name.startswith(prefix[service])
            },
        },
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    events = [orjson.loads(line) for line in out.splitlines() if line.startswith(b"{")]
    crashes = [event for event in events if event["event"] == "background_crashed"]
    assert (process.returncode, len(crashes)) == (1, 1), out.decode()
    assert "a bug of ours" in str(crashes[0])


@pytest.mark.e2e
async def test_a_worker_whose_background_task_breaks_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "break"
    program = BROKEN.format(
        service="inference_proxy",
        loop="services.inference_proxy.keeping/Keeper:run",
        file=str(file),
    )
    async with workers({"e0": StubEngine()}, tmp_path, main=("-c", program)) as proxy:
        file.touch()
        await until(lambda: len(proxy.events("worker_ended")) >= 2, timeout_s=30)
        file.unlink()
        await proxy.ready()
        assert {each["exit_code"] for each in proxy.events("worker_ended")} == {1}
        assert len(proxy.events("background_crashed")) >= 2
        assert await rollout(proxy, session_of(1), turns=1) == [0]
