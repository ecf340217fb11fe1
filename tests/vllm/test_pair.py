"""Prefill and decode on two real servers behind the proxy, against one server alone.

The file-based connector hands the cache over; the proxy merges the rows of both legs. One request
at a time everything is bitwise equal; eight at a time each request is equal to itself.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from fastapi import FastAPI

from scripts.vllm_env.servers import VllmServer, running, start, why_not
from services.inference_proxy.app import create_app
from services.inference_proxy.config import EngineSettings, ProxySettings
from tests.services.inference_proxy.harness import until
from tests.vllm.comparing import GENERATE, Answer, Comparer, ask, body_of, inline_rows
from tests.vllm.report import Report, Row

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
SESSIONS, TURNS = 10, 4
TRAIN = {"X-Sideband-Kind": "train"}


@pytest.fixture(scope="module")
def pair(
    payload_root: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Prefill and decode, which meet in one folder."""
    reason = why_not("0.32")
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("kv")

    def leg(name: str, role: str) -> VllmServer:
        transfer = {
            "kv_connector": "ExampleConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }
        flags = ("--kv-transfer-config", orjson.dumps(transfer).decode())
        return start("0.32", logs / f"{name}.log", *flags, root=payload_root)

    servers = (leg("prefill", "kv_producer"), leg("decode", "kv_consumer"))
    with running(*servers):
        yield servers


@asynccontextmanager
async def proxied(
    engines: dict[str, tuple[str, Any]], root: Path, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, FastAPI]]:
    """The real proxy in front of real engines: name, URL and role of each."""
    configured = tuple(
        EngineSettings(name=name, url=url, role=role) for name, (url, role) in engines.items()
    )
    options: dict[str, Any] = {
        "probe_interval_s": 0.2,
        "probe_timeout_s": 20.0,
        "return_probes": 1,
        "delete_grace_s": 0.5,
        "retry_wait_s_max": 0.1,
        **settings,
    }
    app = create_app(ProxySettings(engines=configured, payload_root=root, **options))
    async with app.router.lifespan_context(app):
        book = app.state.parts.book
        await until(lambda: not book.missing_roles(), timeout_s=60)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://proxy", timeout=300
        ) as http:
            yield http, app


def both(pair: tuple[VllmServer, VllmServer]) -> dict[str, tuple[str, Any]]:
    return {"prefill": (pair[0].url, "prefill"), "decode": (pair[1].url, "decode")}


def user_tokens(session: int, turn: int) -> list[int]:
    """What the environment adds before a turn: more than a block of the cache each time.

    The connector names what it stores by the whole blocks of a prompt. A prompt that adds none
    would be found there by the prefill engine itself, which then loads it and dies.
    """
    count = (65, 39, 33, 97, 64, 40, 36, 50, 34, 90)[(session + 3 * turn) % 10]
    random = np.random.default_rng(1000 * session + turn)
    return [int(token) for token in random.integers(0, 1024, count)]


def turn_body(prompt: list[int], session: int, turn: int, **more: Any) -> dict[str, Any]:
    """Seeded for even sessions, greedy (as top_k 1, since masks need one) for odd ones."""
    params: dict[str, Any] = {"seed": 77 * session + turn} if session % 2 == 0 else {"top_k": 1}
    return body_of(
        prompt,
        f"s{session}.t{turn}",
        max_tokens=5 + turn,
        extra_args={"payload_debug": True},
        **params,
        **more,
    )


async def play(http: httpx.AsyncClient, session: int) -> list[Answer]:
    """All turns of one session, one after the other."""
    history: list[int] = []
    answers = []
    for turn in range(TURNS):
        prompt = history + user_tokens(session, turn)
        body = turn_body(prompt, session, turn)
        answer = await ask(http, body, {**TRAIN, "X-Sideband-Session": f"session-{session}"})
        history = prompt + answer.choices[0].token_ids
        answers.append(answer)
    return answers


def start_of(answer: Answer) -> int:
    """The first position whose row an answer carries."""
    found: int = (answer.body.get("routed_experts_start") or {}).get("0", 0)
    return found


async def test_forty_turns_through_a_pair_equal_those_of_one_server(
    pair: tuple[VllmServer, VllmServer],
    vllm_0_32: VllmServer,
    payload_root: Path,
    comparer: Comparer,
    report: Report,
) -> None:
    paired: list[list[Answer]] = []
    alone: list[list[Answer]] = []
    async with proxied(both(pair), payload_root) as (http, _):
        paired = [await play(http, session) for session in range(SESSIONS)]
    async with proxied({"one": (vllm_0_32.url, "colocated")}, payload_root) as (http, _):
        alone = [await play(http, session) for session in range(SESSIONS)]
    row = report.row("0.32 pair = one server, one at a time")
    for session in range(SESSIONS):
        for turn in range(TURNS):
            check_equal(paired[session][turn], alone[session][turn], comparer, row)
    assert row.turns == SESSIONS * TURNS


def check_equal(first: Answer, second: Answer, comparer: Comparer, row: Row) -> None:
    """Tokens, rows and masks of two answers to one request, in both forms of each."""
    one, other = first.choices[0], second.choices[0]
    assert one.token_ids == other.token_ids
    assert start_of(first) == start_of(second)
    np.testing.assert_array_equal(inline_rows(one), inline_rows(other))
    assert one.sampling_mask == other.sampling_mask
    comparer.check(second, Row(""), start=start_of(second))
    comparer.check(first, row, start=start_of(first))


async def test_eight_at_once_each_equal_to_themselves(
    pair: tuple[VllmServer, VllmServer], payload_root: Path, comparer: Comparer, report: Report
) -> None:
    row = report.row("0.32 pair, eight at once")
    async with proxied(both(pair), payload_root) as (http, _):
        played = await asyncio.gather(*(play(http, 20 + session) for session in range(8)))
        streams = await asyncio.gather(
            *(
                ask(http, turn_body(user_tokens(40 + n, 0), 40 + n, 0, stream=True), TRAIN)
                for n in range(8)
            )
        )
    for answers in (*played, streams):
        for answer in answers:
            comparer.check(answer, row, start=start_of(answer))


async def until_metric(server: VllmServer, name: str) -> None:
    """Until a metric is not zero any more."""
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(server.metric, name):  # noqa: ASYNC110 - a metric
            await asyncio.sleep(0.1)


async def test_a_decode_engine_that_dies_is_ejected_and_leaves_no_file(
    pair: tuple[VllmServer, VllmServer], payload_root: Path, comparer: Comparer
) -> None:
    before = comparer.files()
    settings = {"delete_grace_s": 0.2, "attempts_max": 2}
    async with proxied(both(pair), payload_root, **settings) as (http, app):
        bodies = [turn_body(user_tokens(60 + n, 0), 60 + n, 0, stream=n % 2 == 1) for n in range(8)]
        for body in bodies:
            body["sampling_params"]["max_tokens"] = 900
        tasks = [asyncio.create_task(http.post(GENERATE, json=b, headers=TRAIN)) for b in bodies]
        await until_metric(pair[1], "vllm:num_requests_running")
        pair[1].kill()
        replies = await asyncio.gather(*tasks)
        for reply, body in zip(replies, bodies, strict=True):
            if body.get("stream") and reply.status_code == 200:  # it had begun
                assert "upstream_failed" in reply.text
                assert "[DONE]" not in reply.text
            else:
                assert reply.status_code in {502, 503}, reply.text
                assert reply.headers["content-type"] == "application/problem+json"
        views = {view["name"]: view for view in (await http.get("/v1/engines")).json()["engines"]}
        assert views["decode"]["state"] == "ejected"
        assert views["prefill"]["is_serving"]
        await until(lambda: app.state.parts.janitor.pending == 0, timeout_s=20)
    assert comparer.files() == before
