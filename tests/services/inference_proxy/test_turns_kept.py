"""Kept turns over HTTP: what a client dropped of an answer, given to whoever hands it in."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fastapi.responses import StreamingResponse

from services.kit.turns import TURNS_CONTENT_TYPE, TurnWire
from sideband.ids import RunId
from sideband.model import ModelShape
from sideband.payload.root import PayloadRoot
from sideband.segments import PayloadSegment
from tests.services.inference_proxy.harness import GENERATE, Running, request_body, running, until
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import kept_ids, sampled
from tests.services.inference_proxy.test_streams import cut_off, events_of, last_of

PROMPT = [5, 17, 3, 42, 8, 1]
BINARY = {"accept": TURNS_CONTENT_TYPE}
FORMS = ("inline", "handle", "spill")


class TalkingEngine(StubEngine):
    """Tells log probabilities and weights as a real one does."""

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super().generate(body)
        for choice in answer["choices"]:
            tokens = choice["token_ids"]
            content = [{"token_id": t, "logprob": logprob(t), "rank": 1} for t in tokens]
            choice["logprobs"] = {"content": content}
            choice["weight_versions"] = [
                {"version": "2", "start": 0, "end": 1},
                {"version": "3", "start": 1, "end": len(tokens)},
            ]
        return answer

    async def events(self, whole: dict[str, Any]) -> Any:
        for choice in whole["choices"]:
            choice["logprobs_whole"] = choice.pop("logprobs")["content"]
        async for event in super().events(whole):
            yield self._told(event)

    @staticmethod
    def _told(event: bytes) -> bytes:
        if not event.startswith(b"data: {"):
            return event
        body = msgspec.json.decode(event[6:])
        for choice in body["choices"]:
            entries = choice.pop("logprobs_whole")
            mine = [e for e in entries if e["token_id"] in choice["token_ids"]][:1]
            choice["logprobs"] = {"content": mine}
            if choice["finish_reason"] is None:
                choice["weight_versions"] = None
        return b"data: " + msgspec.json.encode(body) + b"\n\n"


def logprob(token: int) -> float:
    return -0.1 - token / 64


def engines_of(form: str, *, is_pair: bool) -> dict[str, StubEngine]:
    if not is_pair:
        return {"e0": TalkingEngine(spills=form == "spill")}
    return {
        "p0": TalkingEngine("prefill", spills=form == "spill"),
        "d0": TalkingEngine("decode", spills=form == "spill"),
    }


async def fetched(proxy: Running, *request_ids: str, choice: int = 0) -> list[TurnWire]:
    asked = [{"request_id": each, "choice": choice} for each in request_ids]
    answer = await proxy.http.post("/v1/turns/fetch", json={"turns": asked}, headers=BINARY)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == TURNS_CONTENT_TYPE
    return msgspec.msgpack.decode(answer.content, type=list[TurnWire])


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("form", FORMS)
async def test_what_is_kept_is_what_the_answer_said(
    tmp_path: Path, form: str, is_pair: bool, is_stream: bool
) -> None:
    root = None if form == "inline" else tmp_path / "root"
    async with running(engines_of(form, is_pair=is_pair), root=root) as proxy:
        body = {**request_body(PROMPT, top_p=0.9), "stream": is_stream}
        reply = await proxy.generate(body, session="s1")
        events = events_of(reply.text)[:-1] if is_stream else [reply.json()]
        last = last_of(events) if is_stream else reply.json()
        (turn,) = await fetched(proxy, "r1")
        tokens = sampled(PROMPT, 4)
        assert np.frombuffer(turn.prompt_token_ids, "<i4").tolist() == PROMPT
        assert np.frombuffer(turn.completion_token_ids, "<i4").tolist() == tokens
        expected = np.asarray([logprob(token) for token in tokens], "<f4")
        assert turn.logprobs == expected.tobytes()
        assert np.frombuffer(turn.weight_versions or b"", "<i4").tolist() == [2, 3, 3, 3]
        assert (turn.temperature, turn.top_p, turn.top_k) == (1.0, 0.9, 20)
        assert (turn.request_id, turn.choice_count, turn.sampled) == ("r1", 1, None)
        if form == "inline":
            assert turn.routed_experts == last["choices"][0]["routed_experts"]
            assert turn.sampling_mask == [kept_ids(token) for token in tokens]
            assert turn.payload_segments is None
        else:
            segments = msgspec.convert(last["payload_segments"]["0"], list[PayloadSegment])
            assert turn.payload_segments == segments
            assert turn.payload_model == msgspec.convert(last["payload_model"], ModelShape)
            assert (turn.routed_experts, turn.sampling_mask) == (None, None)


async def test_inline_rows_of_a_follow_up_turn_say_where_they_begin() -> None:
    async with running({"e0": TalkingEngine()}) as proxy:
        await proxy.generate(request_body(PROMPT), session="s1")
        prompt = [*PROMPT, *sampled(PROMPT, 4), 7]
        await proxy.generate({**request_body(prompt), "request_id": "r2"}, session="s1")
        answer = await proxy.http.post("/v1/turns/fetch", json={"session_id": "s1"}, headers=BINARY)
        turns = msgspec.msgpack.decode(answer.content, type=list[TurnWire])
        assert [turn.request_id for turn in turns] == ["r1", "r2"]
        assert [turn.routed_experts_prompt_start for turn in turns] == [0, 9]


async def test_the_plain_form_has_the_same_members_as_the_binary_one() -> None:
    async with running({"e0": TalkingEngine()}) as proxy:
        await proxy.generate(request_body(PROMPT, n=2))
        (binary,) = await fetched(proxy, "r1", choice=1)
        asked = {"turns": [{"request_id": "r1", "choice": 1}]}
        answer = await proxy.http.post("/v1/turns/fetch", json=asked)
        (plain,) = answer.json()["turns"]
        assert plain["choice_count"] == 2
        assert plain["prompt_token_ids"] == PROMPT
        assert np.asarray(plain["logprobs"], "<f4").tobytes() == binary.logprobs
        assert plain["weight_versions"] == [2, 3, 3, 3]
        assert plain["routed_experts"] == binary.routed_experts
        assert plain.keys() == set(TurnWire.__struct_fields__) - {"sampled", "advantages"}


async def refused(proxy: Running, **asked: Any) -> tuple[int, str]:
    answer = await proxy.http.post("/v1/turns/fetch", json=asked)
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    return answer.status_code, problem["code"]


async def test_each_reason_not_to_give_a_turn_has_a_name(tmp_path: Path) -> None:
    engine, root = TalkingEngine(), tmp_path / "root"
    async with running({"e0": engine}, root=root) as proxy:
        by_id: dict[str, Any] = {"turns": [{"request_id": "r1"}]}
        assert await refused(proxy, **by_id) == (404, "turn_unknown")
        assert await refused(proxy, session_id="s1") == (404, "turn_unknown")
        await proxy.generate(request_body(PROMPT), session="s1")
        other = {**by_id, "run_id": "run-2"}
        assert await refused(proxy, **other) == (409, "turn_of_other_run")
        own = {**by_id, "run_id": "run-1"}
        assert (await proxy.http.post("/v1/turns/fetch", json=own)).is_success
        for _ in range(2):
            released = await proxy.http.post("/v1/turns/release", json=by_id)
            assert released.status_code == 200
        assert released.json() == {"released": 0}
        assert await refused(proxy, **by_id) == (410, "turn_released")
        await proxy.generate({**request_body([1, 2]), "request_id": "r2"})
        await proxy.generate({**request_body([1, 2, 3]), "request_id": "r2"})
        again = {"turns": [{"request_id": "r2"}]}
        assert await refused(proxy, **again) == (409, "turn_ambiguous")
        metrics = (await proxy.http.get("/metrics")).text
        assert 'proxy_turns_refused_total{code="turn_ambiguous"} 1.0' in metrics
        assert "proxy_kept_turns 0.0" in metrics


async def test_a_turn_that_runs_is_asked_for_again(tmp_path: Path) -> None:
    engine = TalkingEngine(hold=asyncio.Event())
    async with running({"e0": engine}) as proxy:
        task = asyncio.create_task(proxy.generate(request_body(PROMPT), session="s1"))
        await engine.arrived.wait()
        asked = {"turns": [{"request_id": "r1"}]}
        answer = await proxy.http.post("/v1/turns/fetch", json=asked)
        assert (answer.status_code, answer.json()["code"]) == (409, "turn_running")
        assert answer.headers["retry-after"] == "1"
        assert await refused(proxy, session_id="s1") == (409, "turn_running")
        assert engine.hold is not None
        engine.hold.set()
        assert (await task).status_code == 200
        assert len(await fetched(proxy, "r1")) == 1


async def test_failed_evaluated_and_silent_requests_leave_nothing_to_train_on() -> None:
    engine = StubEngine()  # tells no log probabilities
    async with running({"e0": engine}) as proxy:
        await proxy.generate(request_body(PROMPT))
        assert await refused(proxy, turns=[{"request_id": "r1"}]) == (409, "turn_incomplete")
        body = {**request_body(PROMPT), "request_id": "r2"}
        await proxy.http.post(GENERATE, json=body, headers={"X-Sideband-Kind": "eval"})
        assert await refused(proxy, turns=[{"request_id": "r2"}]) == (404, "turn_unknown")
        engine.script.append(lambda _: StubEngine.json({"error": {"message": "no"}}, 400))
        failed = await proxy.generate({**request_body(PROMPT), "request_id": "r3"})
        assert failed.status_code == 400
        assert await refused(proxy, turns=[{"request_id": "r3"}]) == (404, "turn_unknown")


async def test_a_broken_stream_keeps_no_turn(tmp_path: Path) -> None:
    engine = TalkingEngine()

    def cut(body: dict[str, Any]) -> StreamingResponse:
        return StreamingResponse(cut_off(body, engine), media_type="text/event-stream")

    engine.script.append(cut)
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        await proxy.generate({**request_body(PROMPT), "stream": True})
        assert await refused(proxy, turns=[{"request_id": "r1"}]) == (404, "turn_unknown")


async def test_a_client_that_names_no_id_gets_one_that_can_be_handed_in() -> None:
    async with running({"e0": TalkingEngine()}) as proxy:
        body = request_body(PROMPT)
        del body["request_id"]
        names = [(await proxy.generate(body)).json()["request_id"] for _ in range(2)]
        assert names[0] != names[1]
        assert len(await fetched(proxy, *names)) == 2


async def test_a_deleted_session_takes_its_turns_with_it(tmp_path: Path) -> None:
    async with running({"e0": TalkingEngine()}, root=tmp_path / "root") as proxy:
        await proxy.generate(request_body(PROMPT), session="s1")
        await proxy.http.delete("/v1/sessions/s1?delete_files=true")
        assert await refused(proxy, turns=[{"request_id": "r1"}]) == (410, "turn_discarded")
        assert await refused(proxy, session_id="s1") == (410, "turn_discarded")


async def test_turns_of_a_run_that_is_over_are_another_runs(tmp_path: Path) -> None:
    root = tmp_path / "root"
    async with running({"e0": TalkingEngine()}, root=root) as proxy:
        await proxy.generate(request_body(PROMPT))
        PayloadRoot.create(root, RunId("run-2"), fresh=True)
        current = proxy.parts.root
        await until(lambda: current.current is not None and current.current.run_id == "run-2")
        asked = {"run_id": "run-2", "turns": [{"request_id": "r1"}]}
        assert await refused(proxy, **asked) == (409, "turn_of_other_run")


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"turns": []},
        {"turns": [{"request_id": "a b"}]},
        {"turns": [{"request_id": "a", "choice": -1}]},
        {"turns": [{"request_id": "a"}] * 4097},
        {"session_id": ""},
        {"session_id": "s1", "turns": [{"request_id": "a"}]},
        {"session_id": "s1", "more": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("route", ["fetch", "release"])
async def test_a_body_that_asks_for_nothing_is_refused(route: str, asked: dict[str, Any]) -> None:
    async with running({"e0": StubEngine()}) as proxy:
        answer = await proxy.http.post(f"/v1/turns/{route}", json=asked)
        assert answer.status_code == 422


async def test_the_routes_ask_for_the_token() -> None:
    token = "t" * 20
    async with running({"e0": StubEngine()}, admin_tokens=(token,)) as proxy:
        for route in ("fetch", "release"):
            answer = await proxy.http.post(f"/v1/turns/{route}", json={"session_id": "s1"})
            assert answer.status_code == 401


async def test_nothing_is_kept_when_nobody_wants_it() -> None:
    async with running({"e0": TalkingEngine()}, kept_turns_max=0) as proxy:
        await proxy.generate(request_body(PROMPT))
        assert await refused(proxy, turns=[{"request_id": "r1"}]) == (404, "turn_unknown")
