"""Rows of a large answer travel in the parts in which they came: nothing parses or joins them."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from starlette.types import Message

from services.inference_proxy import long_json
from services.kit.turns import TURNS_CONTENT_TYPE, TurnWire
from sideband.engines.inline import decode_npy_base64
from tests.services.inference_proxy.harness import (
    GENERATE,
    TRAIN,
    Running,
    pair,
    request_body,
    running,
)
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import ALPHABET, all_layers, sampled, true_rows
from tests.services.inference_proxy.test_streams import events_of, last_of

TOKENS = 400_000
PROMPT = [token % 61 for token in range(TOKENS)]  # 2.4 MB of rows, 3.2 MB of base64
PART_BYTES_MAX = 1_500_000
CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _little_beside_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever parses rows, or joins them, has more."""
    monkeypatch.setattr(long_json, "BESIDE_BYTES_MAX", 2_500_000)


async def posted(proxy: Running, path: str, body: Any, **headers: str) -> list[bytes]:
    """The parts of the answer as the application sends them."""
    sent: list[Message] = []
    parts: list[bytes] = []
    asked: asyncio.Queue[Message] = asyncio.Queue()
    asked.put_nowait({"type": "http.request", "body": orjson.dumps(body), "more_body": False})

    async def send(message: Message) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and message["body"]:
            parts.append(message["body"])

    named = {"content-type": "application/json", **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(n.lower().encode(), v.encode()) for n, v in named.items()],
        "server": ("proxy", 80),
        "client": ("127.0.0.1", 1),
    }
    await proxy.app(scope, asked.get, send)  # and the client stays
    assert sent[0]["status"] == 200, b"".join(parts)[:500]
    told = dict(sent[0]["headers"]).get(b"content-length")
    assert told is None or int(told) == sum(map(len, parts))
    return parts


def has_all_rows(text: str) -> bool:
    rows = decode_npy_base64(text, bytes_max=1 << 24)
    return np.array_equal(rows, all_layers(true_rows([*PROMPT, *sampled(PROMPT, 4)][:-1])))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_pair", [False, True])
async def test_rows_pass_in_parts_and_are_kept_in_parts(is_pair: bool, is_stream: bool) -> None:
    engines = pair() if is_pair else {"e0": StubEngine()}
    async with running(engines, has_sockets=True) as proxy:
        body = {**request_body(PROMPT, logprobs=0), "stream": is_stream}
        session = {"X-Sideband-Session": "s1"}
        parts = await posted(proxy, GENERATE, body, **TRAIN, **session)
        assert max(map(len, parts)) <= PART_BYTES_MAX
        content = b"".join(parts)
        answer = last_of(events_of(content.decode())) if is_stream else orjson.loads(content)
        rows = answer["choices"][0]["routed_experts"]
        assert has_all_rows(rows)

        for accept in (TURNS_CONTENT_TYPE, "application/json"):
            parts = await posted(proxy, "/v1/turns/fetch", {"session_id": "s1"}, accept=accept)
            # Tokens are numbers in JSON, written at once; rows are as they came.
            assert sorted(map(len, parts))[-2] <= PART_BYTES_MAX
            content = b"".join(parts)
            if accept == TURNS_CONTENT_TYPE:
                (turn,) = msgspec.msgpack.decode(content, type=list[TurnWire])
                text = turn.routed_experts
            else:
                (turn,) = orjson.loads(content)["turns"]
                text = turn["routed_experts"]
            is_same = text == rows  # megabytes belong into no message
            assert is_same


async def test_rows_of_a_chat_pass_in_parts_and_are_kept_in_parts() -> None:
    async with running({"e0": StubEngine()}, has_sockets=True) as proxy:
        text = "".join(ALPHABET[token] for token in PROMPT)
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        parts = await posted(proxy, CHAT, body, **TRAIN, **{"X-Sideband-Session": "s1"})
        assert max(map(len, parts)) <= PART_BYTES_MAX
        shown = orjson.loads(b"".join(parts))["choices"][0]["routed_experts"]
        accept = {"accept": TURNS_CONTENT_TYPE}
        parts = await posted(proxy, "/v1/turns/fetch", {"session_id": "s1"}, **accept)
        (turn,) = msgspec.msgpack.decode(b"".join(parts), type=list[TurnWire])
        is_same = turn.routed_experts == shown
        assert is_same
        assert len(shown) > 8 * TOKENS


async def test_an_answer_with_too_much_beside_its_rows_is_none() -> None:
    def script(body: Any) -> Any:
        choice = {"index": 0, "token_ids": [1], "logprobs": {"content": ["x" * 9] * 400_000}}
        return StubEngine.json({"choices": [choice]})

    engine = StubEngine()
    async with running({"e0": engine}, has_sockets=True, attempts_max=1) as proxy:
        engine.script.append(script)
        answer = await proxy.generate(request_body([1, 2, 3]))
        assert answer.status_code == 502
        assert "beside long strings" in answer.json()["detail"]
