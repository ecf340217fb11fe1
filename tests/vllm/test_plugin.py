"""The plugin in a real server: every answer by handle equals its own inline form, bit by bit."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from scripts.vllm_env.servers import VllmServer
from tests.vllm.comparing import GENERATE, Answer, Comparer, ask, ask_all, body_of, inline_rows
from tests.vllm.conftest import MODEL, RUN
from tests.vllm.report import Report, Row

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
LINES = ["0.30", "0.32"]
DONE = ("vllm:request_success_total", 'finished_reason="length"')


@pytest.fixture(params=LINES)
def server(request: pytest.FixtureRequest) -> VllmServer:
    """Each line in turn."""
    name = f"vllm_{request.param.replace('.', '_')}"
    found: VllmServer = request.getfixturevalue(name)
    return found


@pytest.fixture
async def http(server: VllmServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        yield client


def prompt_of(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 1024, length)]


class Asking:
    """Builds requests by handle in both forms, and checks their answers."""

    def __init__(
        self, server: VllmServer, http: httpx.AsyncClient, comparer: Comparer, row: Row
    ) -> None:
        self.server, self.http, self.comparer, self.row = server, http, comparer, row
        self._count = 0

    def body(self, prompt: list[int], **params: Any) -> dict[str, Any]:
        self._count += 1
        extra = {
            "payload_dir": f"{self.comparer.root}/v7",
            "payload_run_id": RUN,
            "payload_debug": True,
            **params.pop("extra_args", {}),
        }
        name = f"{self.server.line}-{abs(hash(self.row.check)) % 9999}-{self._count}"
        return body_of(prompt, name, extra_args=extra, **params)

    def check(self, answer: Answer, *, start: int = 0) -> None:
        self.comparer.check(answer, self.row, start=start, has_masks=self.server.line == "0.32")


@pytest.fixture
def asking(
    server: VllmServer,
    http: httpx.AsyncClient,
    comparer: Comparer,
    report: Report,
    request: pytest.FixtureRequest,
) -> Asking:
    """One row of the report per test and line."""
    name: str = request.node.originalname
    row = report.row(f"{server.line} {name.removeprefix('test_').replace('_', ' ')}")
    return Asking(server, http, comparer, row)


async def test_prompts_of_all_lengths(asking: Asking) -> None:
    for seed, length in enumerate((1, 2, 31, 32, 33, 64, 100, 257)):
        for params in ({"seed": seed}, {"seed": seed, "max_tokens": 1}, {"top_k": 1}):
            answer = await ask(asking.http, asking.body(prompt_of(length, seed), **params))
            asking.check(answer)


async def test_prefix_cache_hits_have_all_rows(asking: Asking) -> None:
    cold: dict[int, Answer] = {}
    for repeat in range(2):
        for seed in range(4):
            body = asking.body(prompt_of(300 + seed, 100 + seed), seed=seed)
            answer = await ask(asking.http, body)
            asking.check(answer)
            if repeat:
                details = answer.body["usage"]["prompt_tokens_details"]
                assert details["cached_tokens"] > 0
                first = cold[seed].choices[0]
                assert answer.choices[0].token_ids == first.token_ids
                np.testing.assert_array_equal(inline_rows(answer.choices[0]), inline_rows(first))
            cold[seed] = answer


async def test_rows_from_a_position_on(asking: Asking) -> None:
    for length, starts in ((70, (0, 1, 69, 70)), (200, (128, 160, 199))):
        for start in starts:
            body = asking.body(
                prompt_of(length, length + start), seed=start, routed_experts_prompt_start=start
            )
            asking.check(await ask(asking.http, body), start=start)


async def test_several_choices(asking: Asking) -> None:
    for n in (2, 3):
        body = asking.body(prompt_of(40, n), n=n, seed=n)
        answer = await ask(asking.http, body)
        assert sorted(answer.choices) == list(range(n))
        files = {s.file for choice in answer.choices.values() for s in choice.segments}
        assert len(files) == 1
        asking.check(answer)


async def test_streams(asking: Asking) -> None:
    # 0.30 itself ends a stream of several choices with "list index out of range".
    for n in (1,) if asking.server.line == "0.30" else (1, 2):
        for length in (5, 90):
            body = asking.body(prompt_of(length, length), n=n, seed=n, stream=True)
            asking.check(await ask(asking.http, body))


async def test_log_probabilities(asking: Asking) -> None:
    for stream in (False, True):
        body = asking.body(prompt_of(50, 50), seed=5, logprobs=3, stream=stream)
        answer = await ask(asking.http, body)
        raw = answer.body["choices"][0]["logprobs"]["content"]
        assert raw
        asking.check(answer)


async def test_stops(asking: Asking) -> None:
    prompt = prompt_of(60, 60)
    free = await ask(asking.http, asking.body(prompt, seed=1))
    stop = free.choices[0].token_ids[3]
    answer = await ask(asking.http, asking.body(prompt, seed=1, stop_token_ids=[stop]))
    assert answer.choices[0].finish_reason == "stop"
    asking.check(answer)


async def test_eight_at_once(asking: Asking) -> None:
    bodies = [
        asking.body(prompt_of(20 + 15 * n, 500 + n), seed=n, stream=bool(n % 2)) for n in range(16)
    ]
    for part in (bodies[:8], bodies[8:]):
        for answer in await ask_all(asking.http, part):
            asking.check(answer)


async def test_without_the_debug_flag_the_file_holds_the_same(asking: Asking) -> None:
    prompt = prompt_of(100, 9)
    both = await ask(asking.http, asking.body(prompt, seed=4))
    handle = await ask(
        asking.http, asking.body(prompt, seed=4, extra_args={"payload_debug": False})
    )
    inline = await ask(asking.http, body_of(prompt, "inline", seed=4))
    asking.check(both)
    assert handle.choices[0].routed_experts is None
    assert handle.choices[0].sampling_mask is None
    found = asking.comparer.routing(handle.choices[0])
    expected = asking.comparer.routing(both.choices[0])
    assert sorted(found) == sorted(expected)
    for pos, row in found.items():
        np.testing.assert_array_equal(row, expected[pos])
    assert inline.body["routed_layer_ids"] == list(MODEL.layer_ids)
    assert "payload_segments" not in inline.body
    rows = inline_rows(inline.choices[0])
    np.testing.assert_array_equal(rows, inline_rows(both.choices[0])[:, list(MODEL.layer_ids)])


async def test_a_client_that_leaves_leaves_no_file(
    server: VllmServer, http: httpx.AsyncClient, comparer: Comparer
) -> None:
    before, done = comparer.files(), server.metric(*DONE)
    extra = {"payload_dir": f"{comparer.root}/v7"}
    for stream in (False, True):
        params = {"max_tokens": 900, "ignore_eos": True, "extra_args": extra, "stream": stream}
        bodies = [body_of(prompt_of(50, n), f"leaves-{n}", **params) for n in range(8)]
        await asyncio.gather(*(_leave(http, body) for body in bodies))
    await _until(lambda: server.metric("vllm:num_requests_running") == 0)
    left = comparer.files() - before
    assert len(left) <= server.metric(*DONE) - done, "only who left too late may leave a file"
    assert len(left) < 16
    await ask(http, body_of(prompt_of(5, 3), "serves"))


async def test_work_that_the_engine_aborts_is_answered_as_far_as_it_came(asking: Asking) -> None:
    """Tried until an abort came before the end of the work: machines stall as they like."""
    params = {"max_tokens": 900, "ignore_eos": True}
    reasons: set[str | None] = set()
    async with asyncio.timeout(200):
        while "abort" not in reasons:
            bodies = [asking.body(prompt_of(40, n), seed=n, **params) for n in range(16)]
            tasks = [asyncio.create_task(ask(asking.http, body)) for body in bodies]
            await asyncio.sleep(0.5)  # a busy server tells its metrics too late
            assert (await asking.http.post("/pause?mode=abort")).status_code == 200
            assert (await asking.http.post("/resume")).status_code == 200
            for answer in await asyncio.gather(*tasks):
                asking.check(answer)
                reasons.add(answer.choices[0].finish_reason)
    assert reasons <= {"abort", "length"}


async def test_folders_outside_the_root_are_refused_and_nothing_runs(
    server: VllmServer, http: httpx.AsyncClient, comparer: Comparer, tmp_path: Path
) -> None:
    root = comparer.root
    for extra in (
        {"payload_dir": f"{tmp_path}/v1"},
        {"payload_dir": f"{root}/../store/v1"},
        {"payload_dir": str(root)},
        {"payload_dir": f"{root}/v1", "payload_run_id": "another"},
        {"payload_dir": 7},
    ):
        for stream in (False, True):
            body = body_of([1, 2, 3], "refused", extra_args=extra, stream=stream)
            reply = await http.post(GENERATE, json=body)
            assert reply.status_code == 400, reply.text
            assert "extra_args.payload_" in reply.json()["error"]["message"]


async def test_what_it_serves_is_shown(server: VllmServer, http: httpx.AsyncClient) -> None:
    shown = (await http.get("/inference/v1/sideband")).json()
    assert shown["is_by_handle"], shown
    assert shown["vllm"].startswith(server.line)
    assert shown["run_id"] == RUN
    assert shown["payload_model"]["layer_ids"] == list(MODEL.layer_ids)
    assert shown["captures"] == {"routed_experts": True, "sampling_mask": server.line == "0.32"}
    assert "requests by handle are served under" in server.log()


async def _leave(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Begin to read an answer and hang up."""
    timeout = httpx.Timeout(30, read=0.3)  # eight times 900 tokens take any engine here longer
    with suppress(httpx.ReadTimeout):
        async with http.stream("POST", GENERATE, json=body, timeout=timeout) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    return


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.02)
