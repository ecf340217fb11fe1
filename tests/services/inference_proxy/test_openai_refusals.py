"""Train requests on OpenAI routes that make no turn: what is refused, relayed, or not known."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from fastapi import Response

from tests.services.inference_proxy.harness import pair, running, until
from tests.services.inference_proxy.openai_requests import (
    BODIES,
    CHAT,
    TEXT,
    engines_of,
    kept_by,
    train,
)
from tests.services.inference_proxy.stub import StubEngine


async def test_an_engine_that_tells_no_tokens_is_relayed_and_counted() -> None:
    engine = StubEngine(tells_tokens=False)

    def silent(body: dict[str, Any]) -> Response:
        return StubEngine.json({"id": "x", "choices": [{"index": 0, "message": {}}]})

    engine.script.append(silent)
    async with running({"e0": engine}) as proxy:
        reply = await proxy.http.post(CHAT, json=BODIES[CHAT], headers=train())
        assert reply.status_code == 200
        metrics = (await proxy.http.get("/metrics")).text
        assert 'proxy_openai_train_total{outcome="untold"} 1.0' in metrics
        asked = {"turns": [{"request_id": reply.json()["id"]}]}
        fetched = await proxy.http.post("/v1/turns/fetch", json=asked)
        assert fetched.json()["code"] == "turn_unknown"


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("is_pair", [False, True])
async def test_the_empty_500_of_a_server_with_masks_is_a_clear_400(
    kind: str, is_pair: bool
) -> None:
    engines = engines_of("inline", is_pair=is_pair)
    empty = {"error": {"message": "", "type": "InternalServerError", "param": None, "code": 500}}
    first = engines["p0" if is_pair else "e0"]
    first.script.append(lambda _: StubEngine.json(empty, 500))
    async with running(engines) as proxy:
        body = {**BODIES[CHAT], "temperature": 0.0}
        reply = await proxy.http.post(CHAT, json=body, headers={"X-Sideband-Kind": kind})
        assert (reply.status_code, reply.json()["code"]) == (400, "sampling_refused")
        assert len(first.requests) == 1
        assert all(engine.health.failures == 0 for engine in proxy.parts.book)


async def test_an_engines_refusal_keeps_its_own_form(tmp_path: Path) -> None:
    engine = StubEngine(spills=True)
    error = {"error": {"message": "no such model", "type": "NotFoundError", "code": 404}}
    engine.script.append(lambda _: StubEngine.json(error, 404))
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        reply = await proxy.http.post(CHAT, json=BODIES[CHAT], headers=train())
        assert (reply.status_code, reply.json()) == (404, error)


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"echo": True}, "echo_refused", "echo"),
        ({"prompt": ["a", "b"]}, "prompts_refused", "prompt"),
        ({"prompt": [[1], [2]]}, "prompts_refused", "prompt"),
        ({"truncate_prompt_tokens": 3}, "truncation_refused", "truncate_prompt_tokens"),
        ({"vllm_xargs": {"payload_dir": "/x"}}, "payload_dir_refused", "vllm_xargs.payload_dir"),
        ({"temperature": "hot"}, "parameter_refused", "temperature"),
        ({"top_k": 1.5}, "parameter_refused", "top_k"),
        ({"max_tokens": "4"}, "parameter_refused", "max_tokens"),
    ],
)
async def test_what_cannot_be_trained_on_is_refused(
    change: dict[str, Any], code: str, field: str
) -> None:
    engine = StubEngine()
    async with running({"e0": engine}) as proxy:
        reply = await proxy.http.post(TEXT, json={**BODIES[TEXT], **change}, headers=train())
        found = reply.json()
        assert (reply.status_code, found["code"], found["field"]) == (400, code, field)
        assert engine.requests == []


@pytest.mark.parametrize(
    "change",
    [
        {"choices": []},
        {"choices": ["x"]},
        {"choices": None},
        {"prompt_token_ids": []},
        {"prompt_token_ids": ["x"]},
    ],
    ids=str,
)
async def test_an_answer_that_cannot_be_is_a_problem(tmp_path: Path, change: Any) -> None:
    engine = StubEngine(spills=True)
    engine.script.append(lambda body: StubEngine.json({**engine.told(body), **change}))
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        reply = await proxy.http.post(CHAT, json=BODIES[CHAT], headers=train())
        assert (reply.status_code, reply.json()["code"]) == (502, "engine_answer_malformed")
        assert proxy.files() == []


async def test_legs_that_rendered_other_prompts_make_no_turn(tmp_path: Path) -> None:
    engines = pair(spills=True)

    def other(body: dict[str, Any]) -> Response:
        whole = engines["d0"].told(body)
        return StubEngine.json({**whole, "prompt_token_ids": [*whole["prompt_token_ids"][:-1], 9]})

    engines["d0"].script.append(other)
    async with running(engines, root=tmp_path / "root") as proxy:
        reply = await proxy.http.post(CHAT, json=BODIES[CHAT], headers=train())
        assert (reply.status_code, reply.json()["part"]) == (502, "prompt_token_ids")
        await until(lambda: proxy.files() == [])


async def test_a_turn_that_runs_is_not_unknown() -> None:
    engine = StubEngine(hold=asyncio.Event())
    async with running({"e0": engine}) as proxy:
        body = {**BODIES[CHAT], "request_id": "mine"}
        task = asyncio.create_task(proxy.http.post(CHAT, json=body, headers=train()))
        await engine.arrived.wait()
        asked = {"turns": [{"request_id": "mine"}]}
        fetched = await proxy.http.post("/v1/turns/fetch", json=asked)
        assert fetched.json()["code"] == "turn_running"
        assert engine.hold is not None
        engine.hold.set()
        assert orjson.loads((await task).content)["id"] == "mine"
        assert (await kept_by(proxy, "mine")).request_id == "mine"
