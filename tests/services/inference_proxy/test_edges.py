"""Rare ends: answers nobody takes, legs that do not fit together, deletions that fail."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from fastapi import Response
from fastapi.responses import StreamingResponse

from sideband.ids import RequestId, SessionId
from tests.services.inference_proxy.harness import (
    GENERATE,
    TRAIN,
    pair,
    request_body,
    running,
    served_proxy,
    until,
)
from tests.services.inference_proxy.stub import StubEngine

PROMPT = [5, 17, 3, 42]


async def test_an_answer_for_a_session_that_was_just_discarded_leaves_no_file(
    tmp_path: Path,
) -> None:
    engine = StubEngine()
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:

        def script(body: dict[str, Any]) -> Response:
            whole = engine.generate(body)
            session = proxy.parts.sessions.get(SessionId("s1"))
            assert session is not None
            session.is_discarded = True  # as a discard does, too late to cancel anything
            return StubEngine.json(whole)

        for is_stream in (False, True):
            engine.script.append(script)
            body = {**request_body(PROMPT), "stream": is_stream}
            answer = await proxy.generate(body, session="s1")
            if not is_stream:
                assert answer.json()["code"] == "session_discarded"
            await until(lambda: proxy.parts.janitor.pending == 0)
            assert proxy.files() == []


Change = Callable[[dict[str, Any]], dict[str, Any]]


def other_model(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "payload_model": {**answer["payload_model"], "num_layers": 4}}


def other_shape(answer: dict[str, Any]) -> dict[str, Any]:
    answer["payload_segments"]["0"][0]["shape"] = [3, 2]
    return answer


def two_choices(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "choices": [*answer["choices"], {"index": 1, "token_ids": []}]}


@pytest.mark.parametrize("leg", ["p0", "d0"])
@pytest.mark.parametrize("change", [other_model, other_shape, two_choices])
async def test_legs_that_do_not_fit_are_502_and_leave_nothing(
    tmp_path: Path, change: Change, leg: str
) -> None:
    engines = pair()
    engines[leg].script.append(
        lambda body: StubEngine.json(change(engines[leg].generate(body))),
    )
    async with running(engines, root=tmp_path / "root") as proxy:
        answer = await proxy.generate(request_body(PROMPT))
        assert (answer.status_code, answer.json()["code"]) == (502, "engine_answer_malformed")
        await until(lambda: proxy.parts.janitor.pending == 0)
        assert proxy.files() == []


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("inline_leg", ["p0", "d0"])
async def test_one_leg_inline_and_one_by_handle_is_refused(
    tmp_path: Path, inline_leg: str, is_stream: bool
) -> None:
    engines = pair()
    engines[inline_leg].by_handle = False
    async with running(engines, root=tmp_path / "root") as proxy:
        answer = await proxy.generate({**request_body(PROMPT), "stream": is_stream})
        assert "one leg answers by handle, the other inline" in answer.text
        await until(lambda: proxy.parts.janitor.pending == 0)
        assert proxy.files() == []


async def test_a_pair_without_the_plugin_stays_inline_under_a_root(tmp_path: Path) -> None:
    engines = pair()
    for engine in engines.values():
        engine.by_handle = False
    async with running(engines, root=tmp_path / "root") as proxy:
        answer = await proxy.generate(request_body(PROMPT))
        assert answer.json()["choices"][0]["routed_experts"] is not None
        metrics = (await proxy.http.get("/metrics")).text
        assert "proxy_inline_instead_of_handle_total 1.0" in metrics


async def test_a_prefill_leg_that_samples_on_is_refused() -> None:
    engines = pair()

    def script(body: dict[str, Any]) -> Response:
        body["sampling_params"]["max_tokens"] = 3
        return StubEngine.json(engines["p0"].generate(body))

    engines["p0"].script.append(script)
    async with running(engines) as proxy:
        answer = await proxy.generate(request_body(PROMPT))
        assert (answer.status_code, answer.json()["code"]) == (502, "engine_answer_malformed")


async def test_deletions_that_fail_are_counted_and_stop_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    async with running({"e0": StubEngine()}, root=root) as proxy:
        janitor = proxy.parts.janitor
        janitor.discard(policy_version=0, files=["../etc/passwd", "v0/run-2/00/x"], reason="test")
        assert "proxy_deletions_pending 1.0" in (await proxy.http.get("/metrics")).text
        await until(lambda: janitor.pending == 0)
        metrics = (await proxy.http.get("/metrics")).text
        assert "proxy_delete_failures_total 4.0" in metrics
        assert "proxy_deletions_pending 0.0" in metrics
        shutil.rmtree(root)
        janitor.discard(policy_version=0, request_ids=[RequestId("r")], reason="test")
        await until(lambda: janitor.pending == 0)
        assert not any("crashed" in r for r in (await proxy.http.get("/readyz")).text.split(","))


async def test_what_waits_for_its_second_pass_is_done_at_shutdown(tmp_path: Path) -> None:
    engine = StubEngine()
    async with running({"e0": engine}, root=tmp_path / "root", delete_grace_s=3600) as proxy:
        proxy.parts.janitor.discard(policy_version=0, request_ids=[RequestId("r9")], reason="x")
        await asyncio.sleep(0.05)
        extra = {"payload_dir": str(tmp_path / "root" / "v0"), "payload_run_id": "run-1"}
        engine.generate({**request_body(PROMPT, extra_args=extra), "request_id": "r9"})
        assert len(proxy.files()) == 1
    assert list((tmp_path / "root").rglob("*.sbp")) == []


async def test_rows_that_come_twice_in_a_stream_break_it() -> None:
    engine = StubEngine()

    async def twice(body: dict[str, Any]) -> AsyncIterator[bytes]:
        whole = engine.generate(body)
        async for event in engine.events(whole):
            yield event
            if b'"length"' in event:
                yield event

    engine.script.append(
        lambda body: StreamingResponse(twice(body), media_type="text/event-stream")
    )
    async with running({"e0": engine}) as proxy:
        answer = await proxy.generate({**request_body(PROMPT), "stream": True})
        assert '"type":"upstream_failed"' in answer.text
        assert "[DONE]" not in answer.text


async def test_an_openai_answer_that_breaks_off_breaks_off_for_the_client_too() -> None:
    engine = StubEngine()

    async def torn() -> AsyncIterator[bytes]:
        yield b"data: {}\n\n"
        raise ConnectionResetError

    engine.script.append(lambda _: StreamingResponse(torn(), media_type="text/event-stream"))
    async with (
        running({"e0": engine}, has_sockets=True) as proxy,
        served_proxy(proxy) as url,
        httpx.AsyncClient(base_url=url, timeout=5) as client,
    ):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert proxy.parts.book.get("e0").health.failures == 1


async def test_a_pool_without_a_free_connection_is_busy_and_blames_nobody() -> None:
    engine = StubEngine(hold=asyncio.Event())
    settings: dict[str, Any] = {
        "connections_max": 1,
        "pool_timeout_s": 0.05,
        "attempts_max": 1,
        "probe_interval_s": 60.0,
    }
    async with running({"e0": engine}, has_sockets=True, **settings) as proxy:
        first = asyncio.create_task(proxy.generate(request_body(PROMPT)))
        await engine.arrived.wait()
        answer = await proxy.generate(request_body(PROMPT))
        assert (answer.status_code, answer.json()["code"]) == (503, "engine_busy")
        assert proxy.parts.book.get("e0").health.failures == 0
        assert engine.hold is not None
        engine.hold.set()
        assert (await first).status_code == 200


async def test_a_background_task_that_crashes_shows_in_readiness(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_broken = asyncio.Event()

    async def broken(_: object) -> None:
        await has_broken.wait()
        raise RuntimeError("a bug")

    monkeypatch.setattr("services.inference_proxy.keeping.Keeper.run", broken)
    async with running({"e0": StubEngine()}) as proxy:
        assert (await proxy.http.get("/readyz")).status_code == 200
        has_broken.set()
        await until(lambda: proxy.app.crash.has_happened)
        reasons = (await proxy.http.get("/readyz")).json()["reasons"]
        assert reasons == ["a background task crashed"]


async def test_the_posted_body_reaches_the_engine_but_for_what_the_proxy_sets() -> None:
    engine = StubEngine()
    body = {
        **request_body(PROMPT, seed=4, extra_args={"mine": [1]}),
        "model": "policy",
        "priority": 3,
    }
    async with running({"e0": engine}) as proxy:
        await proxy.http.post(
            GENERATE,
            content=orjson.dumps(body),
            headers={**TRAIN, "content-type": "application/json"},
        )
        (seen,) = engine.requests
        assert {**seen, "request_id": "r1"} == body
