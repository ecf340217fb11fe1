"""Retries, ejection and return, disconnects: and that no losing file stays behind."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Response

from tests.services.inference_proxy.harness import (
    GENERATE,
    TRAIN,
    Running,
    pair,
    request_body,
    running,
    served_proxy,
    until,
)
from tests.services.inference_proxy.reading import assert_rows, routing_of
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import sampled, true_rows

PROMPT = [5, 17, 3, 42]


def writes_then_fails(engine: StubEngine) -> Any:
    """An engine that has written its file when its answer is lost."""

    def script(body: dict[str, Any]) -> Response:
        engine.generate(body)
        return StubEngine.json({"error": {"message": "worker died"}}, 500)

    return script


def names(proxy: Running) -> list[str]:
    """Request ids in the files' names."""
    return [file.rsplit("/", 1)[1].rsplit("-", 1)[0] for file in proxy.files()]


async def test_a_retry_has_a_new_id_and_the_losing_file_goes(tmp_path: Path) -> None:
    engine = StubEngine()
    engine.script.append(writes_then_fails(engine))
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        answer = (await proxy.generate(request_body(PROMPT))).json()
        first, second = (request["request_id"] for request in engine.requests)
        assert first.endswith(".a1")
        assert second == first[:-1] + "2"
        await until(lambda: names(proxy) == [second])
        assert_rows(routing_of(answer, proxy.root), true_rows((PROMPT + sampled(PROMPT, 4))[:-1]))


async def test_a_file_that_appears_after_the_first_pass_goes_with_the_second(
    tmp_path: Path,
) -> None:
    engine = StubEngine()
    lost: list[dict[str, Any]] = []

    def script(body: dict[str, Any]) -> Response:
        lost.append(body)
        return StubEngine.json({}, 500)

    engine.script.append(script)
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        await proxy.generate(request_body(PROMPT))
        await asyncio.sleep(0.05)  # the first pass has found nothing
        engine.generate(lost[0])
        assert len(proxy.files()) == 2
        await until(lambda: len(proxy.files()) == 1)
        assert names(proxy) == [engine.requests[-1]["request_id"]]


async def test_other_requests_of_the_same_client_id_keep_their_files(tmp_path: Path) -> None:
    engine = StubEngine()
    async with running({"e0": engine}, root=tmp_path / "root", attempts_max=1) as proxy:
        await proxy.generate(request_body(PROMPT))
        engine.script.append(writes_then_fails(engine))
        assert (await proxy.generate(request_body(PROMPT))).status_code == 502
        await until(lambda: proxy.parts.janitor.pending == 0)
        assert names(proxy) == [engine.requests[0]["request_id"]]


async def test_a_prefill_without_decode_leaves_nothing(tmp_path: Path) -> None:
    engines = pair()
    engines["d0"].script.extend([writes_then_fails(engines["d0"])] * 2)
    async with running(engines, root=tmp_path / "root", attempts_max=2) as proxy:
        answer = await proxy.generate(request_body(PROMPT))
        assert (answer.status_code, answer.json()["code"]) == (502, "upstream_failed")
        assert len(engines["p0"].requests) == 2
        await until(lambda: proxy.parts.janitor.pending == 0)
        assert proxy.files() == []


async def test_a_pair_retried_refers_to_the_second_attempt_only(tmp_path: Path) -> None:
    engines = pair()
    engines["d0"].script.append(writes_then_fails(engines["d0"]))
    async with running(engines, root=tmp_path / "root") as proxy:
        answer = (await proxy.generate(request_body(PROMPT))).json()
        await until(lambda: len(proxy.files()) == 2)
        assert all(name.endswith((".a2.p", ".a2.d")) for name in names(proxy))
        assert_rows(routing_of(answer, proxy.root), true_rows((PROMPT + sampled(PROMPT, 4))[:-1]))


async def test_a_prefill_file_that_the_answer_does_not_name_goes(tmp_path: Path) -> None:
    engines = pair()
    async with running(engines, root=tmp_path / "root") as proxy:
        await proxy.generate(request_body(PROMPT), session="s1")
        # Another sample of this prompt: its rows are there, so prefill writes only its own mask.
        await proxy.generate({**request_body(PROMPT), "request_id": "r2"}, session="s1")
        await until(lambda: len(proxy.files()) == 3)
        assert sum(name.endswith(".p") for name in names(proxy)) == 1


async def test_a_malformed_answer_is_502_and_leaves_nothing(tmp_path: Path) -> None:
    engine = StubEngine()
    wrong: dict[str, Any] = {
        "file of another run": lambda s: {**s, "file": s["file"].replace("run-1", "run-2")},
        "file of another version": lambda s: {**s, "file": s["file"].replace("v0/", "v1/")},
        "path out of the root": lambda s: {**s, "file": "v0/run-1/../x.sbp"},
        "negative position": lambda s: {**s, "pos": -1},
        "rows beyond the tokens": lambda s: {**s, "rows": s["rows"] + 1},
        "unknown field": lambda s: {**s, "field": "logits"},
        "wrong dtype": lambda s: {**s, "dtype": "float32"},
        "unknown member": lambda s: {**s, "extra": 1},
    }
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        for name, change in wrong.items():

            def script(body: dict[str, Any], change: Any = change) -> Response:
                whole = engine.generate(body)
                whole["payload_segments"]["0"][0] = change(whole["payload_segments"]["0"][0])
                return StubEngine.json(whole)

            engine.script.append(script)
            answer = await proxy.generate(request_body(PROMPT))
            assert (answer.status_code, answer.json()["code"]) == (
                502,
                "engine_answer_malformed",
            ), name
        await until(lambda: proxy.parts.janitor.pending == 0)
        assert proxy.files() == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"index": 0, "token_ids": "x"}]}'],
)
async def test_an_answer_that_is_none_is_502(content: bytes) -> None:
    engine = StubEngine()
    engine.script.append(lambda _: Response(content, media_type="application/json"))
    async with running({"e0": engine}) as proxy:
        answer = await proxy.generate(request_body(PROMPT))
        assert (answer.status_code, answer.json()["code"]) == (502, "engine_answer_malformed")


async def test_routing_rows_of_other_tokens_are_refused() -> None:
    """Image placeholders expanded twice: 13313 rows for 6817 tokens (report P10)."""
    engine = StubEngine()

    def script(body: dict[str, Any]) -> Response:
        whole = engine.generate({**body, "token_ids": [1] * 20})
        whole["choices"][0]["token_ids"] = sampled(PROMPT, 4)
        return StubEngine.json(whole)

    engine.script.append(script)
    async with running({"e0": engine}) as proxy:
        answer = await proxy.generate(request_body(PROMPT))
        assert (answer.status_code, answer.json()["code"]) == (502, "engine_answer_malformed")


async def test_an_engine_that_fails_is_ejected_and_comes_back() -> None:
    engines = {"e0": StubEngine(), "e1": StubEngine()}
    async with running(engines, ejection_failures=2, ejection_backoff_s=0.1) as proxy:
        proxy.parts.book.get("e1").in_flight = 9  # so that e0 is asked first
        engines["e0"].script.extend([lambda _: StubEngine.json({}, 500)] * 2)
        engines["e0"].is_healthy = False
        for _ in range(2):
            assert (await proxy.generate(request_body(PROMPT))).status_code == 200
        await until(lambda: proxy.parts.book.get("e0").health.state == "ejected")
        before = len(engines["e0"].requests)
        assert (await proxy.generate(request_body(PROMPT))).status_code == 200
        assert len(engines["e0"].requests) == before
        engines["e0"].is_healthy = True
        await until(lambda: proxy.parts.book.get("e0").health.state == "healthy")
        await proxy.generate(request_body(PROMPT))
        assert len(engines["e0"].requests) == before + 1


async def test_a_dead_engine_is_ejected_at_once_and_its_sessions_move() -> None:
    engines = {"e0": StubEngine(), "e1": StubEngine()}
    async with running(engines, probe_interval_s=60.0, has_sockets=True) as proxy:
        book = proxy.parts.book
        for session in range(8):
            await proxy.generate(request_body(PROMPT), session=f"s{session}")
        dead = next(name for name, engine in engines.items() if engine.requests)
        book.get(dead).url = "http://127.0.0.1:9"  # nothing listens there
        for session in range(8):
            answer = await proxy.generate(request_body(PROMPT), session=f"s{session}")
            assert answer.status_code == 200
        assert book.get(dead).health.state == "ejected"
        assert book.get(dead).ejections_total == 1


async def test_without_an_engine_it_is_503_and_not_ready() -> None:
    async with running({"e0": StubEngine()}) as proxy:
        await proxy.http.post("/v1/engines/e0/eject")
        answer = await proxy.generate(request_body(PROMPT))
        assert (answer.status_code, answer.json()["code"]) == (503, "no_engine")
        assert answer.headers["retry-after"] == "1"
        ready = await proxy.http.get("/readyz")
        assert "no colocated engine serves" in ready.json()["reasons"]
        await proxy.http.post("/v1/engines/e0/return")
        assert (await proxy.http.get("/readyz")).status_code == 200
        assert (await proxy.generate(request_body(PROMPT))).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_cancels_the_engine(tmp_path: Path, is_stream: bool) -> None:
    engine = StubEngine(hold=asyncio.Event())
    async with (
        running({"e0": engine}, root=tmp_path / "root", has_sockets=True) as proxy,
        served_proxy(proxy) as url,
        httpx.AsyncClient(base_url=url, timeout=5) as client,
    ):
        body = {**request_body(PROMPT), "stream": is_stream}
        call = asyncio.create_task(client.post(GENERATE, json=body, headers=TRAIN))
        await engine.arrived.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: engine.cancelled == 1)
        await until(lambda: proxy.parts.book.get("e0").in_flight == 0)
        assert proxy.parts.book.get("e0").health.failures == 0  # not the engine's fault
        await until(lambda: proxy.parts.janitor.pending == 0)
        assert proxy.files() == []


async def test_a_discarded_session_cancels_its_requests(tmp_path: Path) -> None:
    engine = StubEngine(hold=asyncio.Event())
    async with running({"e0": engine}, root=tmp_path / "root", has_sockets=True) as proxy:
        call = asyncio.create_task(proxy.generate(request_body(PROMPT), session="s1"))
        await engine.arrived.wait()
        answer = await proxy.http.delete("/v1/sessions/s1?delete_files=true")
        assert answer.json()["requests_cancelled"] == 1
        refused = await call
        assert (refused.status_code, refused.json()["code"]) == (409, "session_discarded")
        await until(lambda: engine.cancelled == 1)


async def test_a_silent_engine_meets_the_deadline() -> None:
    engine = StubEngine(hold=asyncio.Event())
    async with running({"e0": engine}, request_timeout_s=0.1, has_sockets=True) as proxy:
        answer = await proxy.generate(request_body(PROMPT))
        assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")
        await until(lambda: engine.cancelled == 1)


async def test_an_engine_silent_for_too_long_is_retried_elsewhere() -> None:
    engines = {"e0": StubEngine(hold=asyncio.Event()), "e1": StubEngine()}
    async with running(engines, read_timeout_s=0.1, has_sockets=True) as proxy:
        assert (await proxy.generate(request_body(PROMPT))).status_code == 200
        assert (len(engines["e0"].requests), len(engines["e1"].requests)) == (1, 1)
