"""Train requests on OpenAI routes: the client's answer stays as it was, the turn is kept."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from fastapi import Response

from services.kit.turns import TURNS_CONTENT_TYPE, TurnWire
from tests.services.inference_proxy.harness import Running, pair, running, until
from tests.services.inference_proxy.reading import assert_rows, routing_of
from tests.services.inference_proxy.sglang_engine import SglangEngine, kept_logprob, logprob
from tests.services.inference_proxy.stub import (
    ALPHABET,
    MODEL,
    StubEngine,
    logprob_of,
    rendered,
    sampled,
    true_rows,
)
from tests.services.inference_proxy.test_streams import events_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    TEXT: {"model": "m", "prompt": "Hello", "max_tokens": 4},
}


def train(session: str | None = "s1", version: str | None = None) -> dict[str, str]:
    headers = {"X-Sideband-Kind": "train"}
    if session is not None:
        headers["X-Sideband-Session"] = session
    if version is not None:
        headers["X-Sideband-Policy-Version"] = version
    return headers


async def kept_by(proxy: Running, request_id: str, choice: int = 0) -> TurnWire:
    """The turn that is kept under an answer's id."""
    asked = {"turns": [{"request_id": request_id, "choice": choice}]}
    headers = {"accept": TURNS_CONTENT_TYPE}
    answer = await proxy.http.post("/v1/turns/fetch", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    (turn,) = msgspec.msgpack.decode(answer.content, type=list[TurnWire])
    return turn


def rows_in(turn: TurnWire, root: Path | None) -> dict[int, Any]:
    answer = {
        "choices": [{"routed_experts": turn.routed_experts}],
        "routed_experts_start": {"0": turn.routed_experts_prompt_start},
        "payload_segments": {"0": msgspec.to_builtins(turn.payload_segments or [])},
    }
    return routing_of(answer, root)


def engines_of(form: str, *, is_pair: bool) -> dict[str, StubEngine]:
    spills = form == "spill"
    return pair(spills=spills) if is_pair else {"e0": StubEngine(spills=spills)}


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("form", ["inline", "spill"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_turn_is_kept_and_the_answer_is_the_engines(
    tmp_path: Path, path: str, form: str, is_pair: bool
) -> None:
    root = None if form == "inline" else tmp_path / "root"
    engines = engines_of(form, is_pair=is_pair)
    body = {**BODIES[path], "temperature": 0.7, "top_p": 0.9, "top_k": 20}
    async with running(engines, root=root) as proxy:
        reply = await proxy.http.post(path, json=body, headers=train())
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        prompt = rendered(body)
        tokens = sampled(prompt, 4)
        (choice,) = answer["choices"]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert text == "".join(ALPHABET[token] for token in tokens)
        assert answer["id"].startswith("chatcmpl-" if path == CHAT else "cmpl-")
        assert "token_ids" not in choice
        assert "prompt_token_ids" not in {*answer, *choice}
        assert choice["logprobs"] is None
        assert answer["kv_transfer_params"] is None
        turn = await kept_by(proxy, answer["id"])
        assert np.frombuffer(turn.prompt_token_ids, "<i4").tolist() == prompt
        assert np.frombuffer(turn.completion_token_ids, "<i4").tolist() == tokens
        assert turn.logprobs == np.asarray([logprob_of(t) for t in tokens], "<f4").tobytes()
        assert (turn.temperature, turn.top_p, turn.top_k) == (0.7, 0.9, 20)
        assert (turn.routed_experts is None) == (form == "spill")
        assert_rows(rows_in(turn, root), true_rows([*prompt, *tokens][:-1]))
        if form == "spill":
            assert turn.payload_model == MODEL
            assert choice["routed_experts"] is None
            named = {segment.file for segment in turn.payload_segments or ()}
            assert set(proxy.files()) == named
            assert len(named) == 1 + is_pair
            assert list(answer["payload_segments"]) == ["0"]


async def test_the_client_gets_what_it_asked_for(tmp_path: Path) -> None:
    async with running({"e0": StubEngine()}) as proxy:
        asked = {**BODIES[CHAT], "return_token_ids": True, "logprobs": True, "request_id": "mine"}
        answer = (await proxy.http.post(CHAT, json=asked, headers=train())).json()
        assert answer["id"] == "mine"
        assert answer["prompt_token_ids"] == rendered(asked)
        assert len(answer["choices"][0]["logprobs"]["content"]) == 4
        assert answer["choices"][0]["token_ids"] == sampled(rendered(asked), 4)
        asked = {**BODIES[TEXT], "logprobs": 0}
        answer = (await proxy.http.post(TEXT, json=asked, headers=train())).json()
        assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 4


async def test_a_follow_up_turn_writes_no_row_twice(tmp_path: Path) -> None:
    root = tmp_path / "root"
    async with running({"e0": StubEngine(spills=True)}, root=root) as proxy:
        first = (await proxy.http.post(CHAT, json=BODIES[CHAT], headers=train())).json()
        said = first["choices"][0]["message"]
        messages = [*BODIES[CHAT]["messages"], said, {"role": "user", "content": "More"}]
        body = {**BODIES[CHAT], "messages": messages}
        second = (await proxy.http.post(CHAT, json=body, headers=train())).json()
        before = len(rendered(BODIES[CHAT])) + 4
        turn = await kept_by(proxy, second["id"])
        whole = true_rows((rendered(body) + sampled(rendered(body), 4))[:-1])
        assert_rows(rows_in(turn, root), whole[before - 1 :], start=before - 1)
        by_session = await proxy.http.post("/v1/turns/fetch", json={"session_id": "s1"})
        names = [each["request_id"] for each in by_session.json()["turns"]]
        assert names == [first["id"], second["id"]]


async def test_choices_are_kept_one_by_one(tmp_path: Path) -> None:
    root = tmp_path / "root"
    async with running({"e0": StubEngine(spills=True)}, root=root) as proxy:
        body = {**BODIES[CHAT], "n": 2}
        answer = (await proxy.http.post(CHAT, json=body, headers=train())).json()
        turns = [await kept_by(proxy, answer["id"], choice) for choice in (0, 1)]
        assert [turn.choice_count for turn in turns] == [2, 2]
        assert len(proxy.files()) == 1


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_client_that_wants_events_gets_them_at_the_end(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    async with running({"e0": StubEngine(spills=True)}, root=root) as proxy:
        asked = {**BODIES[path], "stream": True, "stream_options": {"include_usage": True}}
        reply = await proxy.http.post(path, json=asked, headers=train())
        assert reply.headers["content-type"].startswith("text/event-stream")
        *events, done = events_of(reply.text)
        assert done == "[DONE]"
        tokens = sampled(rendered(BODIES[path]), 4)
        text = "".join(ALPHABET[token] for token in tokens)
        parts = [choice for event in events for choice in event["choices"]]
        if path == CHAT:
            assert parts[0]["delta"] == {"role": "assistant", "content": text}
            assert {event["object"] for event in events} == {"chat.completion.chunk"}
        else:
            assert [part["text"] for part in parts] == [text, ""]
        assert [part["finish_reason"] for part in parts] == [None, "length"]
        assert events[-1]["usage"]["completion_tokens"] == 4
        assert len({event["id"] for event in events}) == 1
        turn = await kept_by(proxy, events[0]["id"])
        assert np.frombuffer(turn.completion_token_ids, "<i4").tolist() == tokens


async def test_tool_calls_say_in_events_which_one_they_are() -> None:
    engine = StubEngine()
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "f"}} for i in range(2)]

    def calling(body: dict[str, Any]) -> Response:
        whole = engine.told(body)
        whole["choices"][0]["message"]["tool_calls"] = calls
        return StubEngine.json(whole)

    engine.script.append(calling)
    async with running({"e0": engine}) as proxy:
        asked = {**BODIES[CHAT], "stream": True}
        events = events_of((await proxy.http.post(CHAT, json=asked, headers=train())).text)
        delta = events[0]["choices"][0]["delta"]
        assert delta["tool_calls"] == [{"index": i, **call} for i, call in enumerate(calls)]
        assert not any("usage" in event for event in events[:-1])


async def test_a_folder_goes_to_engines_that_write_themselves(tmp_path: Path) -> None:
    engine, root = StubEngine(), tmp_path / "root"
    async with running({"e0": engine}, root=root, policy_version=3) as proxy:
        reply = await proxy.http.post(CHAT, json=BODIES[CHAT], headers=train())
        assert reply.headers["x-sideband-policy-version"] == "3"
        (request,) = engine.requests
        assert request["vllm_xargs"]["payload_dir"] == str(root / "v3")
        assert request["return_token_ids"] is True
        assert request["logprobs"] is True
        # It did not understand, and the proxy does not know the model: inline, and counted.
        assert "proxy_inline_instead_of_handle_total 1.0" in (await proxy.http.get("/metrics")).text
        turn = await kept_by(proxy, reply.json()["id"])
        assert turn.routed_experts is not None


async def test_a_session_keeps_its_version(tmp_path: Path) -> None:
    async with running({"e0": StubEngine()}, policy_version=3) as proxy:
        await proxy.http.post(CHAT, json=BODIES[CHAT], headers=train(version="2"))
        reply = await proxy.http.post(CHAT, json=BODIES[CHAT], headers=train(version="3"))
        assert (reply.status_code, reply.json()["code"]) == (409, "policy_version_conflict")
        reply = await proxy.http.post(CHAT, json=BODIES[CHAT], headers=train())
        assert reply.headers["x-sideband-policy-version"] == "2"


async def test_a_failed_decode_leaves_no_file_and_the_pair_is_tried_again(tmp_path: Path) -> None:
    engines = pair(spills=True)
    engines["d0"].script.append(lambda _: StubEngine.json({}, 500))
    async with running(engines, root=tmp_path / "root") as proxy:
        answer = (await proxy.http.post(CHAT, json=BODIES[CHAT], headers=train())).json()
        named = {s["file"] for s in answer["payload_segments"]["0"]}
        assert [len(engine.requests) for engine in engines.values()] == [2, 2]
        await until(lambda: set(proxy.files()) == named)


async def test_a_request_of_one_token_is_prefills_alone(tmp_path: Path) -> None:
    engines = pair(spills=True)
    async with running(engines, root=tmp_path / "root") as proxy:
        body = {**BODIES[CHAT], "max_tokens": None, "max_completion_tokens": 1}
        answer = (await proxy.http.post(CHAT, json=body, headers=train())).json()
        assert engines["d0"].requests == []
        turn = await kept_by(proxy, answer["id"])
        assert len(turn.completion_token_ids) == 4


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


async def test_decode_is_never_asked_for_rows_of_the_prompt_not_even_for_evaluation() -> None:
    """A real engine that captures routing may die of it."""
    engines = pair()
    prefilled = {"usage": {"prompt_tokens": 8}, "kv_transfer_params": {"do_remote_prefill": True}}
    engines["p0"].script.append(lambda _: StubEngine.json(prefilled))
    async with running(engines) as proxy:
        await proxy.http.post(CHAT, json=BODIES[CHAT])
        (request,) = engines["d0"].requests
        assert request["routed_experts_prompt_start"] == 8


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


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_sglang_tells_its_turns_in_its_own_places(tmp_path: Path, path: str) -> None:
    root, engine = tmp_path / "root", SglangEngine(spills=True)
    async with running({"s0": engine}, root=root) as proxy:
        body = {**BODIES[path], "top_k": 20}
        answer = (await proxy.http.post(path, json=body, headers=train())).json()
        tokens = sampled(rendered(body), 4)
        (choice,) = answer["choices"]
        assert choice.keys() & {"meta_info", "response_token_ids", "prompt_token_ids"} == set()
        assert choice["logprobs"] is None
        assert "sglext" not in answer
        turn = await kept_by(proxy, answer["id"])
        assert np.frombuffer(turn.completion_token_ids, "<i4").tolist() == tokens
        rows = true_rows([*rendered(body), *tokens][:-1])
        assert_rows(rows_in(turn, root), rows)
        fields = {segment.field for segment in turn.payload_segments or ()}
        told = kept_logprob if path == CHAT else logprob
        assert turn.logprobs == np.asarray([told(t) for t in tokens], "<f4").tobytes()
        # Kept sets come with a chat; a completion of SGLang has none.
        assert fields == {"routed_experts"} | ({"sampling_mask"} if path == CHAT else set())


async def test_several_choices_of_sglang_come_with_a_chat_only(tmp_path: Path) -> None:
    root, engine = tmp_path / "root", SglangEngine(spills=True)
    async with running({"s0": engine}, root=root) as proxy:
        reply = await proxy.http.post(TEXT, json={**BODIES[TEXT], "n": 2}, headers=train())
        assert (reply.status_code, reply.json()["code"]) == (400, "parameter_refused")
        reply = await proxy.http.post(CHAT, json={**BODIES[CHAT], "n": 2}, headers=train())
        assert len(reply.json()["payload_segments"]) == 2
