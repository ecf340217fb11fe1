"""Engines that lie: the client gets a problem or an error event, never a 500, and no file stays."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from fastapi import Response

from services.inference_proxy.headers import is_sendable, to_client
from services.inference_proxy.limits import EVENTS_PER_TURN_MAX
from tests.services.inference_proxy.harness import GENERATE, TRAIN, running
from tests.services.inference_proxy.stub import Json, StubEngine

BODY = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}}
CHOICE = {"index": 0, "token_ids": [1, 2], "finish_reason": "stop", "logprobs": None}
SEGMENT = {
    "field": "routed_experts",
    "file": "v0/run-1/aa/other-0123456789abcdef.sbp",
    "offset": 64,
    "row": 0,
    "pos": 0,
    "rows": 3,
    "dtype": "uint8",
    "shape": [2, 2],
}


def choice(**changes: Any) -> Json:
    return {"choices": [{**CHOICE, **changes}]}


LIES: dict[str, Json] = {
    "a token beyond int32": choice(token_ids=[1 << 63]),
    "a negative token": choice(token_ids=[-1]),
    "a number for tokens": choice(token_ids=5),
    "text for tokens": choice(token_ids="abc"),
    "a choice nobody asked for": choice(index=7),
    "a number for rows": choice(routed_experts=5),
    "a list for rows": choice(routed_experts=["a"]),
    "a number for layers": {**choice(routed_experts="k05V"), "routed_layer_ids": 5},
    "another request's file": {**choice(), "payload_segments": {"0": [SEGMENT]}},
    "rows of no choice": {**choice(), "payload_segments": {"5": [SEGMENT]}},
    "no object for a choice": {"choices": [None]},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_lie_is_the_engines_fault(tmp_path: Path, lie: Json, is_stream: bool) -> None:
    def lying(_: Json) -> Response:
        if not is_stream:
            return Response(orjson.dumps(lie), media_type="application/json")
        content = b"data: " + orjson.dumps(lie) + b"\n\ndata: [DONE]\n\n"
        return Response(content, media_type="text/event-stream")

    engine = StubEngine()
    engine.script.append(lying)
    async with running({"e0": engine}, root=tmp_path / "root", attempts_max=1) as proxy:
        answer = await proxy.generate({**BODY, "stream": is_stream}, session="s1")
        if is_stream:
            assert b'"error"' in answer.content
            assert b"[DONE]" not in answer.content
        else:
            assert answer.status_code == 502
            assert answer.headers["content-type"] == "application/problem+json"
        assert (await proxy.generate(BODY, session="s1")).status_code == 200


async def test_choices_that_nobody_asked_for_are_refused() -> None:
    two = {"choices": [CHOICE, {**CHOICE, "index": 1}]}
    engine = StubEngine()
    engine.script.append(lambda _: Response(orjson.dumps(two), media_type="application/json"))
    async with running({"e0": engine}, attempts_max=1) as proxy:
        answer = await proxy.generate(BODY)
        assert answer.status_code == 502
        assert answer.json()["part"] == "choices"


@pytest.mark.parametrize("kind", ["text/html", "application/json"])
async def test_what_is_no_stream_never_passes_as_one(kind: str) -> None:
    engine = StubEngine()
    engine.script.append(lambda _: Response(b"<script>", media_type=kind))
    async with running({"e0": engine}, attempts_max=1) as proxy:
        answer = await proxy.generate({**BODY, "stream": True})
        assert answer.status_code == 502
        assert answer.json()["code"] == "upstream_failed"


def test_headers_that_http_cannot_carry_end_at_the_proxy() -> None:
    names = {"x-good": "é", "x-utf8": "日本", "x-bytes": "\udcff", "x-line": "a\nset-cookie: b"}
    assert to_client(names.items()) == {"x-good": "é"}
    assert not is_sendable("text/html\x01")


@pytest.mark.parametrize("path", [GENERATE, "/v1/chat/completions"])
async def test_a_strange_header_of_an_engine_is_no_crash(path: str) -> None:
    def strange(_: Json) -> Response:
        content = b"data: " + orjson.dumps(choice()) + b"\n\ndata: [DONE]\n\n"
        answer = Response(content, media_type="text/event-stream")
        answer.raw_headers.append((b"x-strange", "日本".encode()))
        return answer

    engine = StubEngine()
    engine.script.append(strange)
    async with running({"e0": engine}, has_sockets=True) as proxy:
        # A train request on an OpenAI route is asked whole: its events are never an engine's.
        headers = TRAIN if path == GENERATE else {}
        answer = await proxy.http.post(path, json={**BODY, "stream": True}, headers=headers)
        assert answer.status_code == 200
        assert "x-strange" not in answer.headers


async def test_a_part_of_many_events_leaves_the_loop_to_others() -> None:
    events = b'data: {"choices": []}\n\n' * 20_000
    events += b"data: " + orjson.dumps(choice()) + b"\n\ndata: [DONE]\n\n"
    engine = StubEngine()
    engine.script.append(lambda _: Response(events, media_type="text/event-stream"))
    async with running({"e0": engine}) as proxy:
        request = {**BODY, "stream": True}
        task = asyncio.ensure_future(proxy.http.post(GENERATE, json=request, headers=TRAIN))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert task.result().status_code == 200
        assert turns > 20_000 / EVENTS_PER_TURN_MAX
