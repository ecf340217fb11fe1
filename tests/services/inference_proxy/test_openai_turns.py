"""Train requests on OpenAI routes: the client's answer stays as it was, the turn is kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import Response

from tests.services.inference_proxy.harness import pair, running, until
from tests.services.inference_proxy.openai_requests import (
    BODIES,
    CHAT,
    TEXT,
    engines_of,
    kept_by,
    rows_in,
    train,
)
from tests.services.inference_proxy.reading import assert_rows
from tests.services.inference_proxy.sglang_engine import SglangEngine, kept_logprob, logprob
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import (
    ALPHABET,
    MODEL,
    logprob_of,
    rendered,
    sampled,
    true_rows,
)
from tests.services.inference_proxy.test_streams import events_of


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


async def test_decode_is_never_asked_for_rows_of_the_prompt_not_even_for_evaluation() -> None:
    """A real engine that captures routing may die of it."""
    engines = pair()
    prefilled = {"usage": {"prompt_tokens": 8}, "kv_transfer_params": {"do_remote_prefill": True}}
    engines["p0"].script.append(lambda _: StubEngine.json(prefilled))
    async with running(engines) as proxy:
        await proxy.http.post(CHAT, json=BODIES[CHAT])
        (request,) = engines["d0"].requests
        assert request["routed_experts_prompt_start"] == 8


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
