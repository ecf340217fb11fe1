"""Server-sent events: passed on as they come, rows merged into the last event of a choice."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from fastapi import Response
from fastapi.responses import StreamingResponse

from tests.services.inference_proxy.harness import (
    GENERATE,
    TRAIN,
    pair,
    request_body,
    running,
    served_proxy,
    until,
)
from tests.services.inference_proxy.reading import assert_rows, routing_of, segments_of
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import sampled, true_rows

PROMPT = [5, 17, 3, 42, 8, 1]


def streamed(prompt: list[int] = PROMPT, **params: Any) -> dict[str, Any]:
    return {**request_body(prompt, **params), "stream": True}


def events_of(text: str) -> list[Any]:
    """The JSON events, and "[DONE]" as itself."""
    parts = [part.removeprefix("data: ") for part in text.strip().split("\n\n")]
    return [part if part == "[DONE]" else orjson.loads(part) for part in parts]


def last_of(events: list[Any]) -> dict[str, Any]:
    """The event that ends the choice."""
    (last,) = [
        event
        for event in events
        if event != "[DONE]" and any(c.get("finish_reason") for c in event["choices"])
    ]
    assert isinstance(last, dict)
    return last


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("form", ["inline", "handle", "spill"])
async def test_a_stream_carries_the_same_rows_in_its_last_event(
    tmp_path: Path, form: str, is_pair: bool
) -> None:
    by_handle, spills = form != "inline", form == "spill"
    root = tmp_path / "root" if by_handle else None
    engines = pair(spills=spills) if is_pair else {"e0": StubEngine(spills=spills)}
    async with running(engines, root=root) as proxy:
        answer = await proxy.generate(streamed(), session="s1")
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = events_of(answer.text)
        assert events[-1] == "[DONE]"
        tokens = [t for e in events[:-1] for c in e["choices"] for t in c["token_ids"]]
        assert tokens == sampled(PROMPT, 4)
        last = last_of(events)
        assert last["request_id"] == "r1"
        assert_rows(routing_of(last, root), true_rows((PROMPT + tokens)[:-1]))
        assert sum("payload_segments" in e for e in events[:-1]) == by_handle
        if by_handle:
            (mask,) = segments_of(last, "sampling_mask")
            assert (mask.pos, mask.stop) == (6, 10)
            assert not any(c["sampling_mask"] for e in events[:-1] for c in e["choices"])
        # The next turn of the session knows what the stream delivered.
        await proxy.generate(request_body([*PROMPT, *tokens, 1]), session="s1")
        first_leg = proxy.engines["p0" if is_pair else "e0"]
        assert first_leg.requests[-1]["sampling_params"]["routed_experts_prompt_start"] == 9


async def test_a_follow_up_stream_says_where_inline_rows_begin() -> None:
    async with running({"e0": StubEngine()}) as proxy:
        await proxy.generate(request_body(PROMPT), session="s1")
        prompt = [*PROMPT, *sampled(PROMPT, 4)]
        answer = await proxy.generate(streamed(prompt), session="s1")
        last = last_of(events_of(answer.text))
        assert last["routed_experts_start"] == {"0": 9}
        whole = true_rows((prompt + sampled(prompt, 4))[:-1])
        assert_rows(routing_of(last, None), whole[9:], start=9)


async def test_prefills_rows_come_even_when_decode_names_none(tmp_path: Path) -> None:
    """Decode stopped at once and had nothing to write: its last event names no segments."""
    engines = pair()

    async def bare() -> AsyncIterator[bytes]:
        choice = {"index": 0, "token_ids": [1], "finish_reason": "stop", "routed_experts": None}
        yield b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n"
        yield b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n'

    engines["d0"].script.append(lambda _: StreamingResponse(bare(), media_type="text/event-stream"))
    async with running(engines, root=tmp_path / "root") as proxy:
        answer = await proxy.generate(streamed())
        events = events_of(answer.text)
        assert [("payload_segments" in event) for event in events[:-1]] == [True, False]
        assert_rows(routing_of(events[0], proxy.root), true_rows(PROMPT))


@pytest.mark.parametrize("spills", [False, True])
async def test_several_choices_stream_through_one_engine(tmp_path: Path, spills: bool) -> None:
    async with running({"e0": StubEngine(spills=spills)}, root=tmp_path / "root") as proxy:
        events = events_of((await proxy.generate(streamed(n=2))).text)
        (named,) = [e for e in events[:-1] if e.get("payload_segments")]
        assert set(named["payload_segments"]) == {"0", "1"}
        assert len(proxy.files()) == 1


async def cut_off(body: dict[str, Any], engine: StubEngine) -> AsyncIterator[bytes]:
    """A stream that ends after its first token; its file was written already."""
    whole = await asyncio.to_thread(engine.generate, body)
    async for event in engine.events(whole):
        yield event
        return


async def test_a_stream_cut_off_says_so_and_leaves_no_file(tmp_path: Path) -> None:
    engine = StubEngine()
    engine.script.append(
        lambda body: StreamingResponse(cut_off(body, engine), media_type="text/event-stream")
    )
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        events = events_of((await proxy.generate(streamed(), session="s1")).text)
        assert events[-1]["error"]["code"] == 502
        assert "[DONE]" not in events
        await until(lambda: proxy.parts.janitor.pending == 0)
        assert proxy.files() == []
        # What was not delivered whole is asked for again.
        await proxy.generate(request_body(PROMPT), session="s1")
        assert "routed_experts_prompt_start" not in engine.requests[-1]["sampling_params"]


async def test_an_engine_whose_streams_end_early_is_ejected(tmp_path: Path) -> None:
    engine = StubEngine()
    engine.script.extend(
        [lambda body: StreamingResponse(cut_off(body, engine), media_type="text/event-stream")] * 3
    )
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        for failures in (1, 2, 3):
            await proxy.generate(streamed())
            assert proxy.parts.book.get("e0").health.failures == failures
        assert proxy.parts.book.get("e0").health.state == "ejected"


async def test_an_engines_error_event_passes_and_leaves_no_file(tmp_path: Path) -> None:
    engine = StubEngine()

    def script(body: dict[str, Any]) -> Response:
        engine.generate(body)
        content = b'data: {"error": {"message": "oom", "code": 500}}\n\ndata: [DONE]\n\n'
        return Response(content, media_type="text/event-stream")

    engine.script.append(script)
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        events = events_of((await proxy.generate(streamed())).text)
        assert events[0]["error"]["message"] == "oom"
        await until(lambda: proxy.parts.janitor.pending == 0)
        assert proxy.files() == []


async def test_a_stream_is_retried_until_it_has_begun(tmp_path: Path) -> None:
    engine = StubEngine()
    engine.script.append(lambda _: StubEngine.json({}, 500))
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        events = events_of((await proxy.generate(streamed())).text)
        assert events[-1] == "[DONE]"
        assert [r["request_id"][-3:] for r in engine.requests] == [".a1", ".a2"]


@pytest.mark.parametrize("leaves", [False, True])
async def test_events_come_one_by_one_and_leaving_midway_cancels(
    tmp_path: Path, leaves: bool
) -> None:
    engine, going_on, closed = StubEngine(), asyncio.Event(), asyncio.Event()

    async def paced(body: dict[str, Any]) -> AsyncIterator[bytes]:
        whole = await asyncio.to_thread(engine.generate, body)
        try:
            async for event in engine.events(whole):
                yield event
                await going_on.wait()
        finally:
            closed.set()

    engine.script.append(
        lambda body: StreamingResponse(paced(body), media_type="text/event-stream")
    )
    async with (
        running({"e0": engine}, root=tmp_path / "root", has_sockets=True) as proxy,
        served_proxy(proxy) as url,
        httpx.AsyncClient(base_url=url, timeout=5) as client,
    ):
        async with client.stream("POST", GENERATE, json=streamed(), headers=TRAIN) as answer:
            chunks = answer.aiter_bytes()
            first = await anext(chunks)  # it is here although the engine waits
            assert first.count(b"data: ") == 1
            if not leaves:
                going_on.set()
                rest = b"".join([chunk async for chunk in chunks])
                assert rest.endswith(b"data: [DONE]\n\n")
        if leaves:
            await asyncio.wait_for(closed.wait(), 5)
        await until(lambda: proxy.parts.book.get("e0").in_flight == 0)
        await until(lambda: proxy.parts.janitor.pending == 0)
        assert len(proxy.files()) == (not leaves)


async def test_an_eval_stream_is_not_looked_into() -> None:
    engine = StubEngine()
    body = b'data: {"choices": [{"index": 0, "token_ids": [1], "routed_experts": "??"}]}\n\n'
    end = b'data: {"choices": [{"index": 0, "token_ids": [2], "finish_reason": "stop"}]}\n\n'
    engine.script.append(
        lambda _: Response(body + end + b"data: [DONE]\n\n", media_type="text/event-stream")
    )
    async with running({"e0": engine}) as proxy:
        answer = await proxy.http.post(GENERATE, json=streamed())
        events = events_of(answer.text)
        assert events[0]["choices"][0]["routed_experts"] == "??"
        assert events[-1] == "[DONE]"
