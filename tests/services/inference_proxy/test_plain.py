"""The short way gives the answers of the documented way, and takes only what is plainly right."""

import os
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import httpx
import orjson
import pytest
from starlette.types import Message, Scope
from structlog.testing import capture_logs

from services.inference_proxy.endpoints import generate
from services.inference_proxy.endpoints.plain import PlainRequests, plain_headers
from services.inference_proxy.request_ids import RANDOM_BYTES, RandomHex
from services.kit.logs import name_request
from tests.services.inference_proxy.harness import GENERATE, Running, request_body, running
from tests.services.inference_proxy.stub import StubEngine

ANSWER = "services.inference_proxy.endpoints.plain.answer"
JSON = ("content-type", "application/json")
GOOD = orjson.dumps(request_body([5, 17, 3, 42]))
HEADERS: list[list[tuple[str, str]]] = [
    [JSON],
    [JSON, ("x-sideband-kind", "train"), ("x-sideband-session", "s.1")],
    [JSON, ("x-sideband-kind", "frozen"), ("x-sideband-policy-version", "0")],
    [JSON, ("x-sideband-kind", "Train")],
    [JSON, ("x-sideband-kind", "")],
    [JSON, ("x-sideband-session", "../x")],
    [JSON, ("x-sideband-session", "")],
    [JSON, ("x-sideband-policy-version", "-1")],
    [JSON, ("x-sideband-policy-version", " 0")],
    [JSON, ("x-sideband-policy-version", "0.0")],
    [JSON, ("x-sideband-policy-version", "1000000000")],
    [JSON, ("x-sideband-kind", "train"), ("x-sideband-kind", "eval")],
    [JSON, ("x-sideband-session", "s1"), ("x-sideband-session", "s2")],
    [("content-type", "application/json; charset=utf-8")],
    [("content-type", "text/plain")],
    [],
]
BODIES = [
    GOOD,
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff",
    b'{"token_ids": [1, true], "sampling_params": {}}',
    b'{"token_ids": [1, 2.0], "sampling_params": {}}',
    b'{"token_ids": [1, -2], "sampling_params": {}}',
    b'{"token_ids": [1, 2147483648], "sampling_params": {}}',
    b'{"token_ids": [1, NaN], "sampling_params": {}}',
    b'{"token_ids": [], "sampling_params": {}}',
    b'{"token_ids": "12", "sampling_params": {}}',
    b'{"token_ids": {"0": 1}, "sampling_params": {}}',
    b'{"token_ids": [1], "token_ids": [2, "x"], "sampling_params": {}}',
    b'{"token_ids": ["x"], "token_ids": [2, 3], "sampling_params": {}}',
    b'{"sampling_params": {}}',
    b'{"token_ids": [1]}',
    b'{"token_ids": [1], "sampling_params": {"n": true}}',
    b'{"token_ids": [1], "sampling_params": {"n": 0}}',
    b'{"token_ids": [1], "sampling_params": {"payload_dir": "/"}}',
    b'{"token_ids": [1], "sampling_params": {}, "request_id": ""}',
    b'{"token_ids": [1], "sampling_params": {}, "request_id": "a/b"}',
    b'{"token_ids": [1], "sampling_params": {}, "request_id": null, "stream": null}',
    b'{"token_ids": [1], "sampling_params": {}, "stream": 1}',
    b'{"token_ids": [1], "sampling_params": {}, "other": "\xff"}',
    b'{"token_ids": [1], "sampling_params": {}, "other": [' + b"1," * 70_000 + b"1]}",
    b'{"token_ids": [' + b"1," * 70_000 + b'1], "sampling_params": {}}',
    b'{"token_ids": [' + b"1," * 70_000 + b'true], "sampling_params": {}}',
    b'{"token_ids": [' + b"1," * 70_000 + b'1.0], "sampling_params": {}}',
    b'{"token_ids": [' + b"1," * 70_000 + b'-1], "sampling_params": {}}',
    b'{"token_ids": [' + b"1," * 70_000 + b"1]",
]


async def said(proxy: Running, content: bytes, headers: list[tuple[str, str]]) -> dict[str, Any]:
    """Status, type and body of an answer, without the id that the proxy makes."""
    answer = await proxy.http.post(GENERATE, content=content, headers=httpx.Headers(headers))
    body = answer.json()
    if "request_id" not in orjson.loads(GOOD if content == GOOD else b"{}"):
        body.pop("request_id", None)
    return {"status": answer.status_code, "type": answer.headers["content-type"], **body}


async def test_both_ways_give_the_same_answers_and_ask_the_same() -> None:
    engine = StubEngine()
    async with running({"e0": engine}) as proxy:
        short = proxy.app.shortcut
        assert isinstance(short, PlainRequests)
        cases = [(GOOD, headers) for headers in HEADERS] + [(body, [JSON]) for body in BODIES]
        statuses = set()
        for content, headers in cases:
            first = await said(proxy, content, headers)
            proxy.app.shortcut = None
            assert await said(proxy, content, headers) == first, (content[:80], headers)
            proxy.app.shortcut = short
            statuses.add(first["status"])
        assert statuses == {200, 400, 422}
        asked = [{**request, "request_id": ""} for request in engine.requests]
        assert asked[::2] == asked[1::2]


async def test_what_is_right_takes_the_short_way_and_counts_under_its_route() -> None:
    async with running({"e0": StubEngine()}) as proxy:
        with patch(ANSWER, wraps=generate.answer) as taken:
            for headers in HEADERS[:3]:
                await said(proxy, GOOD, headers)
            assert taken.call_count == 3
            await said(proxy, b"{}", [JSON])
            assert taken.call_count == 3
        metrics = (await proxy.http.get("/metrics")).text
        assert f'method="POST",route="{GENERATE}",status="200"}} 3.0' in metrics
        assert f'method="POST",route="{GENERATE}",status="422"}} 1.0' in metrics


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_other_methods_are_refused_as_everywhere(method: str) -> None:
    async with running({"e0": StubEngine()}) as proxy:
        answer = await proxy.http.request(method, GENERATE)
        assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")


async def test_the_short_way_asks_for_the_token_too() -> None:
    token = "a-token-of-the-tests"
    async with running({"e0": StubEngine()}, admin_tokens=(token,)) as proxy:
        for given, status in ((None, 401), ("other", 401), (token, 200)):
            headers = [JSON] if given is None else [JSON, ("authorization", f"Bearer {given}")]
            assert (await said(proxy, GOOD, headers))["status"] == status


def test_plain_headers() -> None:
    given = [*HEADERS[1], ("traceparent", "00-1"), ("cookie", "a=b"), ("connection", "close")]
    found = plain_headers([(name.encode(), value.encode()) for name, value in given])
    assert found is not None
    assert (found.kind, found.session, found.policy_version) == ("train", "s.1", None)
    assert sorted(found.to_engine) == [("connection", "close"), ("traceparent", "00-1")]


async def test_a_body_in_parts_is_the_same_body() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(GOOD), 7):
            yield GOOD[start : start + 7]

    async with running({"e0": StubEngine()}) as proxy:
        with patch(ANSWER, wraps=generate.answer) as taken:
            answer = await proxy.http.post(GENERATE, content=parts(), headers=[JSON])
            assert (answer.status_code, taken.call_count) == (200, 1)


@pytest.mark.parametrize("is_declared", [True, False])
async def test_the_short_way_has_the_same_bound(is_declared: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 1000

    content = b" " * 3000 if is_declared else parts()
    async with running({"e0": StubEngine()}, body_bytes_max=2048) as proxy:
        answer = await proxy.http.post(GENERATE, content=content, headers=[JSON])
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


async def test_a_client_that_leaves_within_its_body_asks_nothing() -> None:
    engine = StubEngine()
    async with running({"e0": engine}) as proxy:
        due: list[Message] = [
            {"type": "http.request", "body": GOOD[:9], "more_body": True},
            {"type": "http.disconnect"},
        ]

        async def receive() -> Message:
            return due.pop(0) if len(due) > 1 else due[0]

        async def send(message: Message) -> None:
            assert message.get("status") != 200

        headers = [(name.encode(), value.encode()) for name, value in [JSON]]
        scope: Scope = {"type": "http", "path": GENERATE, "method": "POST", "headers": headers}
        scope.update(query_string=b"", http_version="1.1", scheme="http", root_path="")
        await proxy.app(scope, receive, send)
        assert engine.requests == []


async def test_a_bug_on_the_short_way_tells_the_client_nothing_and_the_log_where() -> None:
    async with running({"e0": StubEngine()}) as proxy:
        with patch(ANSWER, side_effect=RuntimeError("secret detail")), capture_logs() as logs:
            answer = await proxy.http.post(GENERATE, content=GOOD, headers=[JSON])
        assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
        assert "secret" not in answer.text
        assert [(event["event"], event["path"]) for event in logs] == [
            ("request_crashed", GENERATE)
        ]
        metrics = (await proxy.http.get("/metrics")).text
        assert f'method="POST",route="{GENERATE}",status="500"}} 1.0' in metrics


async def test_events_of_both_ways_name_their_request() -> None:
    async with running({"e0": StubEngine()}) as proxy:
        await proxy.http.post("/v1/admin/pause")
        with capture_logs(processors=[name_request]) as logs:
            for rest in ("", "; charset=utf-8"):  # the second is not plain
                await said(proxy, GOOD, [("content-type", f"application/json{rest}")])
        assert [(e["event"], e["method"], e["path"]) for e in logs] == [
            ("request_refused", "POST", GENERATE)
        ] * 2


def test_random_digits_never_come_twice() -> None:
    digits = RandomHex()
    taken = [digits.take(8) for _ in range(RANDOM_BYTES)]  # several times what is held
    assert len(set(taken)) == len(taken)
    assert all(len(one) == 8 for one in taken)


def test_a_forked_child_takes_fresh_digits() -> None:
    with patch("os.register_at_fork") as register, patch("os.urandom", wraps=os.urandom) as asked:
        digits = RandomHex()
        digits.take(8)
        register.call_args.kwargs["after_in_child"]()
        digits.take(8)
        assert asked.call_count == 2
