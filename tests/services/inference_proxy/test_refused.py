"""Each kind of malformed or forbidden body has its own answer, and no engine sees it."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.services.inference_proxy.harness import (
    GENERATE,
    TRAIN,
    pair,
    request_body,
    running,
)
from tests.services.inference_proxy.stub import StubEngine

GOOD = request_body([1, 2, 3])


def changed(**members: Any) -> dict[str, Any]:
    return {**GOOD, **members}


def sampling(**params: Any) -> dict[str, Any]:
    return {**GOOD, "sampling_params": {**GOOD["sampling_params"], **params}}


MALFORMED: dict[str, Any] = {
    "not json": b"{",
    "not utf-8": b'{"token_ids": [1], "x": "\xff"}',
    "NaN": b'{"token_ids": [NaN], "sampling_params": {}}',
    "a list": [],
    "no tokens": {"sampling_params": {}},
    "no sampling": {"token_ids": [1]},
    "empty prompt": changed(token_ids=[]),
    "negative token": changed(token_ids=[-1]),
    "huge token": changed(token_ids=[1 << 31]),
    "text token": changed(token_ids=["1"]),
    "true token": changed(token_ids=[True]),
    "nested tokens": changed(token_ids=[[1]]),
    "text n": sampling(n="2"),
    "zero n": sampling(n=0),
    "zero max_tokens": sampling(max_tokens=0),
    "negative prompt_start": sampling(routed_experts_prompt_start=-1),
    "list extra_args": sampling(extra_args=[]),
    "stream as text": changed(stream="yes"),
    "id with slash": changed(request_id="../x"),
    "id with newline": changed(request_id="x\n"),
    "empty id": changed(request_id=""),
    "long id": changed(request_id="x" * 129),
    "dots id": changed(request_id=".."),
}
FORBIDDEN: dict[str, tuple[Any, str]] = {
    "payload_dir": (sampling(extra_args={"payload_dir": "/tmp/v0"}), "payload_dir_refused"),
    "payload_dir null": (sampling(extra_args={"payload_dir": None}), "payload_dir_refused"),
    "payload_dir on top": (changed(payload_dir="/tmp"), "payload_dir_refused"),
    "payload_dir in params": (sampling(payload_dir="/tmp"), "payload_dir_refused"),
    "payload_dir in xargs": (changed(vllm_xargs={"payload_dir": "/"}), "payload_dir_refused"),
    "run id": (sampling(extra_args={"payload_run_id": "other"}), "payload_dir_refused"),
    "truncation": (sampling(truncate_prompt_tokens=2), "truncation_refused"),
    "truncation on top": (changed(truncate_prompt_tokens=2), "truncation_refused"),
    "transfer host": (changed(kv_transfer_params={"remote_host": "x"}), "kv_transfer_refused"),
    "transfer in args": (
        sampling(extra_args={"kv_transfer_params": {"remote_host": "x"}}),
        "kv_transfer_refused",
    ),
    "start beyond prompt": (sampling(routed_experts_prompt_start=4), "prompt_start_refused"),
}


async def test_malformed_bodies_are_422_and_name_the_field(tmp_path: Path) -> None:
    engine = StubEngine()
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        for name, body in MALFORMED.items():
            content = body if isinstance(body, bytes) else orjson.dumps(body)
            headers = {**TRAIN, "content-type": "application/json"}
            answer = await proxy.http.post(GENERATE, content=content, headers=headers)
            assert answer.status_code == 422, name
            assert answer.headers["content-type"] == "application/problem+json", name
            assert answer.json()["detail"], name
    assert engine.requests == []


async def test_forbidden_bodies_are_400_with_a_code_each(tmp_path: Path) -> None:
    engine = StubEngine()
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        for name, (body, code) in FORBIDDEN.items():
            answer = await proxy.generate(body)
            assert (answer.status_code, answer.json()["code"]) == (400, code), name
    assert engine.requests == []


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Sideband-Kind": "training"},
        {"X-Sideband-Session": "a/b"},
        {"X-Sideband-Session": ".."},
        {"X-Sideband-Policy-Version": "-1"},
        {"X-Sideband-Policy-Version": "1e3"},
        {"X-Sideband-Policy-Version": "1000000000"},
    ],
)
async def test_malformed_headers_are_422(headers: dict[str, str]) -> None:
    async with running({"e0": StubEngine()}) as proxy:
        answer = await proxy.http.post(GENERATE, json=GOOD, headers={**TRAIN, **headers})
        assert answer.status_code == 422


async def test_choices_through_a_pair_are_400_on_every_route() -> None:
    async with running(pair()) as proxy:
        for kind in ("train", "eval"):
            headers = {"X-Sideband-Kind": kind}
            answer = await proxy.http.post(GENERATE, json=sampling(n=2), headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (400, "choices_refused")
        chat = await proxy.http.post("/v1/chat/completions", json={"n": 2, "messages": []})
        assert chat.json()["code"] == "choices_refused"
        assert proxy.engines["p0"].requests == []


async def test_truncation_is_fine_for_eval() -> None:
    async with running({"e0": StubEngine()}) as proxy:
        answer = await proxy.http.post(GENERATE, json=sampling(truncate_prompt_tokens=2))
        assert answer.status_code == 200


async def test_a_body_over_the_limit_is_413() -> None:
    async with running({"e0": StubEngine()}, body_bytes_max=1024) as proxy:
        answer = await proxy.generate(request_body([1] * 2000))
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


async def test_openai_bodies_name_no_folder_and_no_host() -> None:
    engine = StubEngine()
    async with running({"e0": engine}) as proxy:
        for members, code in (
            ({"vllm_xargs": {"payload_dir": "/"}}, "payload_dir_refused"),
            ({"kv_transfer_params": {"remote_host": "evil"}}, "kv_transfer_refused"),
        ):
            answer = await proxy.http.post("/v1/completions", json={"prompt": "x", **members})
            assert (answer.status_code, answer.json()["code"]) == (400, code)
    assert engine.requests == []


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": None}, {"top_k": 0}])
async def test_an_empty_500_of_a_mask_server_is_a_clear_400(params: dict[str, Any]) -> None:
    engine = StubEngine()
    body = sampling(**params)
    error = {"error": {"message": "", "type": "InternalServerError", "param": None, "code": 500}}
    engine.script.append(lambda _: StubEngine.json(error, 500))
    async with running({"e0": engine}) as proxy:
        answer = await proxy.generate(body)
        assert (answer.status_code, answer.json()["code"]) == (400, "sampling_refused")
        assert "temperature > 0 and top_k > 0" in answer.json()["detail"]
        assert len(engine.requests) == 1
        assert proxy.parts.book.get("e0").health.failures == 0  # not the engine's fault


async def test_what_the_engine_refuses_keeps_its_status_and_words() -> None:
    engine = StubEngine()
    error = {"error": {"message": "prompt too long", "type": "BadRequestError", "code": 400}}
    engine.script.append(lambda _: StubEngine.json(error, 400))
    async with running({"e0": engine}) as proxy:
        answer = await proxy.generate(GOOD)
        assert (answer.status_code, answer.json()["code"]) == (400, "engine_refused")
        assert "prompt too long" in answer.json()["detail"]
        assert len(engine.requests) == 1  # a fault of the request is not retried


async def test_the_proxys_own_token_refused_is_not_the_clients_fault() -> None:
    engine = StubEngine()
    engine.script.append(lambda _: StubEngine.json({"error": "Unauthorized"}, 401))
    async with running({"e0": engine}) as proxy:
        answer = await proxy.generate(GOOD)
        assert (answer.status_code, answer.json()["code"]) == (502, "upstream_failed")
