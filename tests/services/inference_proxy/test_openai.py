"""OpenAI routes: the engine's own bytes, whole or streamed."""

import pytest

from tests.services.inference_proxy.harness import pair, running
from tests.services.inference_proxy.stub import StubEngine

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_engines_answer_passes_as_it_is(path: str) -> None:
    engine = StubEngine()
    async with running({"e0": engine}) as proxy:
        answer = await proxy.http.post(path, json=CHAT, headers={"X-Sideband-Kind": "eval"})
        assert answer.json() == {"object": "chat.completion", "model": "policy"}
        assert engine.requests == [CHAT]
        streamed = await proxy.http.post(path, json={**CHAT, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text == 'data: {"delta": "a"}\n\ndata: [DONE]\n\n'


async def test_models_come_from_an_engine() -> None:
    async with running({"e0": StubEngine()}) as proxy:
        assert (await proxy.http.get("/v1/models")).json() == {"data": [{"id": "stub"}]}


async def test_a_pair_prefills_first_and_threads_the_transfer() -> None:
    engines = pair()
    async with running(engines) as proxy:
        body = {**CHAT, "max_completion_tokens": 9, "stream": True, "stop": ["x"]}
        answer = await proxy.http.post("/v1/chat/completions", json=body)
        assert answer.text.endswith("data: [DONE]\n\n")
        (prefill,), (decode,) = engines["p0"].requests, engines["d0"].requests
        assert (prefill["max_completion_tokens"], prefill["stream"]) == (1, False)
        assert prefill["kv_transfer_params"]["do_remote_decode"] is True
        assert "stop" not in prefill  # a leg that stops keeps no cache for decode
        assert decode == {**body, "kv_transfer_params": {"do_remote_prefill": True}}


async def test_an_engines_refusal_keeps_the_form_that_openai_clients_read() -> None:
    engine = StubEngine()
    error = {"error": {"message": "no such model", "type": "NotFoundError", "code": 404}}
    engine.script.append(lambda _: StubEngine.json(error, 404))
    async with running({"e0": engine}) as proxy:
        answer = await proxy.http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()) == (404, error)


async def test_failures_are_retried_and_then_a_problem() -> None:
    engine = StubEngine()
    engine.script.extend([lambda _: StubEngine.json({}, 500)] * 4)
    async with running({"e0": engine}, ejection_failures=9) as proxy:
        answer = await proxy.http.post("/v1/completions", json=CHAT)
        assert (answer.status_code, answer.json()["code"]) == (502, "upstream_failed")
        assert len(engine.requests) == 3
        assert (await proxy.http.post("/v1/completions", json=CHAT)).status_code == 200
        assert len(engine.requests) == 5
