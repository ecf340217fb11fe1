"""Rollouts by reference: the proxy has kept their turns, the client knows ids and rewards."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from services.kit.turns import TURNS_CONTENT_TYPE, TurnWire
from services.orchestrator.rollout_schemas import RolloutBody, TurnBody
from services.orchestrator.wire import ROLLOUT_CONTENT_TYPE, decode_rollout
from tests.services.orchestrator.stubs import StubProxy, refusal
from tests.services.orchestrator.support import (
    assert_problem,
    orchestrator,
    plain_turn,
    written_turn,
)

REFS = {"turn_refs": [{"request_id": "r.t0"}, {"request_id": "r.t1", "choice": 0}]}
SESSION = {"session_id": "r"}


@dataclass
class KeepingProxy(StubProxy):
    """Gives the turns that a test put there, and remembers what it was asked."""

    turns: list[TurnWire] = field(default_factory=list)
    fetched: list[dict[str, Any]] = field(default_factory=list)
    released: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[httpx.Response] = field(default_factory=list)

    def keep(self, turns: Sequence[dict[str, Any]]) -> None:
        self.turns = [TurnBody.model_validate(turn).to_wire() for turn in turns]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.is_down or not request.url.path.startswith("/v1/turns/"):
            return super().__call__(request)
        asked = json.loads(request.content)
        if request.url.path == "/v1/turns/release":
            self.released.append(asked)
            return httpx.Response(200, json={"released": 1})
        self.fetched.append(asked)
        assert request.headers["accept"] == TURNS_CONTENT_TYPE
        if self.refusals:
            return self.refusals.pop(0)
        content = msgspec.msgpack.encode(self.turns)
        return httpx.Response(200, content=content, headers={"content-type": TURNS_CONTENT_TYPE})


def two_turns(**more: Any) -> list[dict[str, Any]]:
    return [
        plain_turn("r.t0", [1, 2, 3], [4, 5], **more),
        plain_turn("r.t1", [1, 2, 3, 4, 5, 6], [7], **more),
    ]


@pytest.mark.parametrize("is_binary", [False, True])
@pytest.mark.parametrize("by", [REFS, SESSION], ids=["requests", "session"])
async def test_it_is_taken_in_as_if_the_turns_had_been_sent(
    tmp_path: Path, by: dict[str, Any], is_binary: bool
) -> None:
    proxy = KeepingProxy()
    proxy.keep(two_turns())
    async with orchestrator(tmp_path, proxy=proxy, step_rollouts=2) as bench:
        for name in ("whole", "r"):
            await bench.lease(name)
        await bench.deliver("whole", *two_turns())
        body = {"rollout_id": "r", "status": "completed", "reward": 1.0, **by}
        if is_binary:
            answer = await bench.http.post(
                "/v1/rollouts",
                content=msgspec.msgpack.encode(body),
                headers={"content-type": ROLLOUT_CONTENT_TYPE},
            )
        else:
            answer = await bench.http.post("/v1/rollouts", json=body)
        assert answer.status_code == 202, answer.text
        await bench.until(lambda: bool(bench.feed.steps), "the step is shipped")
        ((batch,),) = bench.feed.steps[1].grid
        assert {span.sample_id for span in batch.spans} == {"whole.b0", "r.b0"}
        first, second = (slice(span.start, span.start + span.length) for span in batch.spans)
        for column in (batch.token_ids_L, batch.loss_mask_L, batch.logprobs_L):
            assert column[first].tolist() == column[second].tolist()
        (asked,) = proxy.fetched
        assert asked["run_id"] == "run-1"
        if by is REFS:
            assert [each["request_id"] for each in asked["turns"]] == ["r.t0", "r.t1"]
        else:
            assert (asked["session_id"], asked.get("turns")) == ("r", None)
        await bench.until(lambda: proxy.released == [asked], "the turns are released")


async def test_again_it_is_the_same_one_and_nothing_is_fetched(tmp_path: Path) -> None:
    proxy = KeepingProxy()
    proxy.keep(two_turns())
    async with orchestrator(tmp_path, proxy=proxy, step_rollouts=9) as bench:
        await bench.lease("r")
        first = await bench.deliver("r", **SESSION)
        proxy.refusals.append(refusal(410, "turn_released"))
        again = await bench.deliver("r", **SESSION)
        assert (first.status_code, again.status_code) == (202, 202)
        assert first.json() == again.json()
        assert len(proxy.fetched) == 1
        other = await bench.deliver("r", reward=0.5, **SESSION)
        assert_problem(other, 409, "rollout_conflict")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (404, "turn_unknown"),
        (409, "turn_running"),
        (409, "turn_of_other_run"),
        (409, "turn_ambiguous"),
        (409, "turn_incomplete"),
        (410, "turn_expired"),
        (410, "turn_released"),
    ],
)
async def test_a_turn_that_is_not_given_is_named_and_the_lease_stays(
    tmp_path: Path, status: int, code: str
) -> None:
    proxy = KeepingProxy()
    problem = {"code": code, "detail": f"request r.t0: {code}", "request_id": "r.t0"}
    proxy.refusals.append(httpx.Response(status, json=problem))
    async with orchestrator(tmp_path, proxy=proxy) as bench:
        await bench.lease("r")
        answer = await bench.deliver("r", **REFS)
        found = assert_problem(answer, status, code)
        assert found["request_id"] == "r.t0"
        assert answer.headers.get("retry-after") == ("1" if code == "turn_running" else None)
        # The lease is still open: the client may send the turns themselves.
        assert (await bench.deliver("r", *two_turns())).status_code == 202
        assert proxy.released == []


async def test_failed_work_is_taken_in_though_its_turns_are_gone(tmp_path: Path) -> None:
    proxy = KeepingProxy()
    proxy.refusals.append(refusal(410, "turn_expired"))
    async with orchestrator(tmp_path, proxy=proxy) as bench:
        await bench.lease("r", session_id="r")
        answer = await bench.deliver("r", status="failed", reward=None, **SESSION)
        assert answer.status_code == 202
        assert (answer.json()["state"], answer.json()["dropped"]) == ("dropped", {"failed": 1})
        await bench.until(lambda: proxy.discarded == ["r"], "its session is discarded")


async def test_failed_work_gives_up_the_files_that_its_turns_name(tmp_path: Path) -> None:
    proxy = KeepingProxy()
    async with orchestrator(tmp_path, proxy=proxy) as bench:
        assert bench.root is not None
        proxy.keep([written_turn(bench.root, "r.t0", [1, 2, 3], [4, 5])])
        assert len(bench.on_disk()) == 1
        await bench.lease("r")
        await bench.deliver("r", status="aborted", reward=None, **SESSION)
        await bench.until(lambda: not bench.on_disk(), "its file is deleted")


async def test_turns_that_break_a_rule_are_refused_and_released(tmp_path: Path) -> None:
    proxy = KeepingProxy()
    proxy.keep([plain_turn("r.t0", [1, 2, 3], [4, 5], logprobs=[0.0])])
    async with orchestrator(tmp_path, proxy=proxy) as bench:
        await bench.lease("r")
        for _ in range(2):
            assert_problem(await bench.deliver("r", **REFS), 422, "malformed_turn")
        assert len(proxy.fetched) == 1
        await bench.until(lambda: len(proxy.released) == 2, "the turns are released")


async def test_without_a_lease_nothing_is_fetched(tmp_path: Path) -> None:
    proxy = KeepingProxy()
    async with orchestrator(tmp_path, proxy=proxy) as bench:
        assert_problem(await bench.deliver("r", **REFS), 404, "lease_unknown")
        assert proxy.fetched == []


async def test_a_proxy_that_does_not_answer_is_asked_again_by_the_client(tmp_path: Path) -> None:
    proxy = KeepingProxy()
    proxy.keep(two_turns())
    wrong = [
        refusal(500, "internal_error"),
        refusal(404, "not_found"),
        httpx.Response(404, text="no such route"),
        httpx.Response(200, content=b"\xc1"),
        httpx.Response(200, content=b"x" * 5000),
    ]
    async with orchestrator(tmp_path, proxy=proxy, body_bytes_max=4096) as bench:
        await bench.lease("r")
        for answer in wrong:
            proxy.refusals.append(answer)
            found = await bench.deliver("r", **REFS)
            assert_problem(found, 503, "proxy_unavailable")
            assert found.headers["retry-after"] == "1"
        proxy.is_down = True
        assert_problem(await bench.deliver("r", **REFS), 503, "proxy_unavailable")
        proxy.is_down = False
        assert (await bench.deliver("r", **REFS)).status_code == 202


async def test_a_run_without_a_proxy_says_so(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, with_proxy=False, initial_policy_version=0) as bench:
        await bench.lease("r")
        assert_problem(await bench.deliver("r", **REFS), 409, "no_proxy")


@pytest.mark.parametrize(
    "body",
    [
        {**REFS, **SESSION},
        {**SESSION, "turns": two_turns()},
        {"turn_refs": []},
        {"turn_refs": [{"request_id": "a b"}]},
        {"turn_refs": [{"request_id": "a", "choice": 4096}]},
        {"session_id": ""},
        {"session_id": "r", "choice": -1},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_binary", [False, True])
async def test_a_rollout_says_its_turns_in_one_way(
    tmp_path: Path, body: dict[str, Any], is_binary: bool
) -> None:
    whole = {"rollout_id": "r", "status": "completed", "reward": 1.0, **body}
    if is_binary:
        if "turns" in whole:
            whole["turns"] = [TurnBody.model_validate(turn).to_wire() for turn in whole["turns"]]
        content, kind = msgspec.msgpack.encode(whole), ROLLOUT_CONTENT_TYPE
    else:
        content, kind = json.dumps(whole).encode(), "application/json"
    async with orchestrator(tmp_path, proxy=KeepingProxy()) as bench:
        await bench.lease("r")
        answer = await bench.http.post(
            "/v1/rollouts", content=content, headers={"content-type": kind}
        )
        assert_problem(answer, 422, "invalid_request")


def test_both_forms_say_the_same() -> None:
    body = {"rollout_id": "r", "status": "completed", "reward": 1.0, **REFS}
    binary = decode_rollout(msgspec.msgpack.encode(body))
    assert binary == RolloutBody.model_validate(body).to_wire()
    assert binary.is_by_reference
    assert binary.ways == 1
