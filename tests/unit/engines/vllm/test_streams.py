"""Streams: segments come once, with the event that ends the last choice."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.unit.engines.vllm.fakes import Script, rows_of, script_for
from tests.unit.engines.vllm.running import inline_rows, server, until

PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize("choices", [1, 3])
async def test_segments_come_with_the_event_that_ends_the_last_choice(
    tmp_path: Path, choices: int
) -> None:
    running = server(tmp_path, script_for(5, choices=choices))
    events = await running.events(running.request(PROMPT, n=choices, stream=True))
    (told,) = [number for number, event in enumerate(events) if "payload_segments" in event]
    assert told == len(events) - 2  # usage follows
    assert events[told]["choices"][0]["finish_reason"] == "length"
    for event in events[:-1]:
        assert event["choices"][0]["routed_experts"] is None
        assert event["choices"][0]["sampling_mask"] is None
    for index in range(choices):
        segments = events[told]["payload_segments"][str(index)]
        np.testing.assert_array_equal(running.rows(segments), running.script.routing[index])
        assert running.masks(segments, choice=index) == running.script.masks[index]
    assert len(running.files()) == 1


async def test_the_debug_flag_streams_both_forms(tmp_path: Path) -> None:
    running = server(tmp_path, script_for(5))
    request = running.request(PROMPT, stream=True, more={"payload_debug": True})
    events = await running.events(request)
    last = events[-2]
    segments = last["payload_segments"]["0"]
    np.testing.assert_array_equal(running.rows(segments), inline_rows(last["choices"][0]))
    streamed = [row for event in events[:-1] for row in event["choices"][0]["sampling_mask"]]
    assert streamed == running.masks(segments)


async def test_inline_streams_name_their_layers_where_rows_come(tmp_path: Path) -> None:
    running = server(tmp_path, script_for(5, choices=2))
    events = await running.events(running.request(PROMPT, n=2, stream=True, extra={}))
    for event in events[:-1]:
        (choice,) = event["choices"]
        has_rows = choice["routed_experts"] is not None
        assert has_rows == (choice["finish_reason"] is not None)
        assert ("routed_layer_ids" in event) == has_rows
        if has_rows:
            expected = running.script.routing[choice["index"]][:, 1:]
            np.testing.assert_array_equal(inline_rows(choice), expected)


async def test_rows_that_cannot_be_written_end_the_stream_with_an_error(tmp_path: Path) -> None:
    running = server(tmp_path, Script(routing={0: rows_of(3)}))
    events = await running.events(running.request(PROMPT, stream=True))
    assert "choice 0" in events[-1]["error"]["message"]
    assert all("payload_segments" not in event for event in events)
    assert running.files() == []


async def test_a_client_that_leaves_before_the_last_event_leaves_no_file(tmp_path: Path) -> None:
    running = server(tmp_path, script_for(5))
    stream = await running.handler.serve_tokens(running.request(PROMPT, stream=True), None)
    async for event in stream:
        if "payload_segments" in event:
            break  # it was made, and nobody took it
    assert len(running.files()) == 1
    await stream.aclose()
    assert running.script.closed
    await asyncio.to_thread(running.settled)
    assert running.files() == []


async def test_a_client_that_has_the_last_event_keeps_its_file(tmp_path: Path) -> None:
    running = server(tmp_path, script_for(5))
    stream = await running.handler.serve_tokens(running.request(PROMPT, stream=True), None)
    is_told = False
    async for event in stream:
        if is_told:
            break  # usage or [DONE]: the one before was sent
        is_told = "payload_segments" in event
    await stream.aclose()
    await asyncio.to_thread(running.settled)
    assert len(running.files()) == 1


async def test_a_stream_that_is_cancelled_while_tokens_are_made_leaves_no_file(
    tmp_path: Path,
) -> None:
    script = script_for(5)
    script.gate = asyncio.Event()
    running = server(tmp_path, script)

    async def consume() -> None:
        async for _ in await running.handler.serve_tokens(running.request(PROMPT, stream=True)):
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: script.closed)
    await asyncio.to_thread(running.settled)
    assert running.files() == []
