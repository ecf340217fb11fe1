"""How workers and their parent begin and end, by a kill, a signal or a fault: as real processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from fastapi.responses import StreamingResponse

from tests.services.inference_proxy.harness import GENERATE, TRAIN, until
from tests.services.inference_proxy.stub import Script, StubEngine
from tests.services.inference_proxy.stub_model import sampled
from tests.services.inference_proxy.workers import (
    PROMPT,
    Workers,
    rollout,
    session_of,
    starts,
    turn,
    workers,
)

pytestmark = pytest.mark.e2e


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def port_closed(proxy: Workers) -> None:
    """Until nobody is accepted any more: at once after a signal."""
    async with asyncio.timeout(10):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            except (ConnectionRefusedError, ConnectionResetError):
                return
            writer.close()


async def test_a_killed_worker_comes_back_with_what_holds_for_all(tmp_path: Path) -> None:
    engine = StubEngine()
    async with workers({"e0": engine, "e1": StubEngine()}, tmp_path) as proxy:
        await proxy.ask("POST", "/v1/policy-version", json={"policy_version": 2})
        await proxy.ask("POST", "/v1/engines/e1/eject")
        for worker in (0, 1):
            session, other = session_of(worker), session_of(1 - worker)
            for name in (session, other):
                assert await rollout(proxy, name, turns=2) == [2, 2]
            os.kill(proxy.pid(worker), signal.SIGKILL)
            # At once: what arrives for the dead one waits for the next in its place.
            for name in (session, other):
                answer = await proxy.generate(turn([*PROMPT, 7], f"{name}.t2"), session=name)
                assert answer.headers["x-sideband-policy-version"] == "2"
            # Its memory is gone, the other's is not.
            assert (starts(engine, session)[-1], starts(engine, other)[-1]) == (0, len(PROMPT))
            views = (await proxy.ask("GET", "/v1/engines")).json()["engines"]
            assert [(v["state"], v["policy_version"]) for v in views] == [
                ("healthy", 2),
                ("held", 2),
            ]
            for name in (session, other):
                await proxy.ask("DELETE", f"/v1/sessions/{name}")
        codes = [(each["worker"], each["exit_code"]) for each in proxy.events("worker_ended")]
        assert codes == [(0, -9), (1, -9)]


async def test_a_worker_killed_before_anything_was_reported_comes_back_with_its_engines(
    tmp_path: Path,
) -> None:
    engine = StubEngine()
    async with workers({"e0": engine}, tmp_path, ejection_failures=10**6) as proxy:
        engine.is_healthy = False  # from now on no probe tells anybody that it serves
        for worker in (0, 1):
            os.kill(proxy.pid(worker), signal.SIGKILL)
            assert await rollout(proxy, session_of(worker), turns=1) == [0]
        codes = [(each["worker"], each["exit_code"]) for each in proxy.events("worker_ended")]
        assert codes == [(0, -9), (1, -9)]


async def test_a_worker_that_does_not_follow_is_replaced_before_a_report_is_answered(
    tmp_path: Path,
) -> None:
    async with workers({"e0": StubEngine()}, tmp_path) as proxy:
        stopped = proxy.pid(1)
        async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=30) as http:
            await http.get("/v1/policy-version")  # now the connection is the leader's
            os.kill(stopped, signal.SIGSTOP)
            answer = await http.post("/v1/policy-version", json={"policy_version": 5})
        assert answer.json()["applied"] == 5
        assert not lives(stopped)
        assert await rollout(proxy, session_of(1), turns=1) == [5]


async def test_an_engine_that_hangs_when_it_is_returned_ends_no_worker(tmp_path: Path) -> None:
    engine, hanging = StubEngine(), StubEngine()
    async with workers({"e0": engine, "e1": hanging}, tmp_path) as proxy:
        await proxy.ask("POST", "/v1/engines/e1/eject")
        hanging.hangs_until = asyncio.Event()
        answer = await proxy.ask("POST", "/v1/engines/e1/return")  # probed for longer than it lasts
        assert (answer.status_code, answer.json()["is_serving"]) == (200, False)
        for worker in (0, 1):
            assert await rollout(proxy, session_of(worker), turns=1) == [0]
        hanging.hangs_until.set()
        assert proxy.events("worker_ended") == proxy.events("worker_does_not_follow") == []


SOON_MISSED = """
from services.inference_proxy.config import ProxySettings
from services.inference_proxy.workers.serving import serve_proxy

serve_proxy(ProxySettings(), silent_s_max=3.0)
"""


async def test_a_worker_that_hangs_is_replaced_also_when_nothing_changes(tmp_path: Path) -> None:
    async with workers({"e0": StubEngine()}, tmp_path, main=("-c", SOON_MISSED)) as proxy:
        for worker in (1, 0):
            os.kill(proxy.pid(worker), signal.SIGSTOP)
            # Nobody asks it anything; what arrives waits for the next in its place.
            assert await rollout(proxy, session_of(worker), turns=1) == [0]
        for event in ("worker_hangs", "worker_ended"):
            assert [each["worker"] for each in proxy.events(event)] == [1, 0]


async def test_a_told_end_lets_requests_finish_in_every_worker(tmp_path: Path) -> None:
    engine = StubEngine(hold=asyncio.Event())
    async with workers({"e0": engine}, tmp_path) as proxy:
        running = [
            asyncio.create_task(proxy.generate(turn(PROMPT, f"r{w}"), session=session_of(w)))
            for w in (0, 1)
        ]
        await until(lambda: len(engine.requests) == 2)
        proxy.process.send_signal(signal.SIGTERM)
        await port_closed(proxy)
        assert engine.hold is not None
        engine.hold.set()
        assert [(await each).status_code for each in running] == [200, 200]
        async with asyncio.timeout(10):
            assert await proxy.process.wait() == 0
        assert proxy.events("worker_ended") == []


def in_two(engine: StubEngine, gate: asyncio.Event) -> Script:
    """A stream of which the first event comes at once, and the others through ``gate``."""

    async def events(body: Any) -> AsyncIterator[bytes]:
        parts = engine.events(engine.generate(body))
        yield await anext(parts)
        await gate.wait()
        async for part in parts:
            yield part

    return lambda body: StreamingResponse(events(body), media_type="text/event-stream")


async def streamed(proxy: Workers, session: str, begun: set[str]) -> list[str]:
    """The lines of a streamed answer; ``begun`` has the session from the first one on."""
    lines = []
    headers = {**TRAIN, "X-Sideband-Session": session}
    body = turn(PROMPT, f"{session}.t0", stream=True)
    async with (
        httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=30) as http,
        http.stream("POST", GENERATE, json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            begun.add(session)
            if line:
                lines.append(line.removeprefix("data: "))
    return lines


async def test_a_told_end_lets_streams_finish_in_every_worker(tmp_path: Path) -> None:
    engine, gate, begun = StubEngine(), asyncio.Event(), set[str]()
    sessions = [session_of(worker, number=n) for worker in (0, 1) for n in range(10)]
    engine.script.extend(in_two(engine, gate) for _ in sessions)
    async with workers({"e0": engine}, tmp_path) as proxy:
        running = [asyncio.create_task(streamed(proxy, each, begun)) for each in sessions]
        await until(lambda: len(begun) == len(sessions), timeout_s=20)
        proxy.process.send_signal(signal.SIGTERM)
        await port_closed(proxy)
        assert not any(task.done() for task in running)
        gate.set()
        for lines in await asyncio.gather(*running):
            assert lines[-1] == "[DONE]"
            choices = [choice for line in lines[:-1] for choice in orjson.loads(line)["choices"]]
            tokens = [token for choice in choices for token in choice["token_ids"]]
            assert tokens == sampled(PROMPT, 4)
            assert choices[-1]["finish_reason"] == "length"
        async with asyncio.timeout(10):
            assert await proxy.process.wait() == 0
        assert proxy.events("worker_ended") == proxy.events("workers_killed") == []


async def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    async with workers({"e0": StubEngine()}, tmp_path) as proxy:
        pids = [proxy.pid(worker) for worker in (0, 1)]
        proxy.process.kill()
        await proxy.process.wait()
        await until(lambda: not any(map(lives, pids)), timeout_s=20)


async def test_settings_that_no_worker_can_begin_with_end_the_parent_too(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.json"
    with pytest.raises(RuntimeError, match=r"nothing\.json"):
        async with workers({"e0": StubEngine()}, tmp_path, model_config_path=nothing):
            pass


async def test_a_second_proxy_on_the_same_port_does_not_start(tmp_path: Path) -> None:
    async with workers({"e0": StubEngine()}, tmp_path) as proxy:
        (tmp_path / "second").mkdir()
        with pytest.raises(RuntimeError, match="Address already in use"):
            async with workers({"e0": StubEngine()}, tmp_path / "second", port=proxy.port):
                pass
