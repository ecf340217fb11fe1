"""Bodies that are no rollout: refused by name, nothing half done, the lease stays open."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.orchestrator.wire import ROLLOUT_CONTENT_TYPE
from tests.services.orchestrator.support import Bench, assert_problem, orchestrator, plain_turn

TURN = plain_turn("r0.t0", [1, 2], [3, 4])
GOOD: dict[str, Any] = {
    "rollout_id": "r0",
    "status": "completed",
    "reward": 1.0,
    "turns": [TURN],
}


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with orchestrator(tmp_path, by_handle=False, with_feed=False) as bench:
        await bench.lease("r0")
        yield bench


async def still_takes_the_good_one(bench: Bench) -> None:
    assert [lease.state for lease in bench.service.book.open_leases.values()] == ["open"]
    assert (await bench.http.post("/v1/rollouts", json=GOOD)).status_code == 202


JSON_BODIES = {
    "not json": b"{",
    "empty": b"",
    "a list": b"[]",
    "not utf-8": b'{"rollout_id": "\xff"}',
    "nested too deep": b"[" * 100_000,
    "a number for a list": json.dumps({**GOOD, "turns": 7}).encode(),
    "a string for a number": json.dumps({**GOOD, "reward": "1"}).encode(),
    "nan": json.dumps({**GOOD, "turns": [{**TURN, "temperature": float("nan")}]}).encode()[:-9],
    "an unknown member": json.dumps({**GOOD, "rewards": 1}).encode(),
    "an unknown member of a turn": json.dumps({**GOOD, "turns": [{**TURN, "x": 1}]}).encode(),
    "no status": json.dumps({"rollout_id": "r0", "turns": []}).encode(),
    "an unknown status": json.dumps({**GOOD, "status": "done"}).encode(),
    "an id with a slash": json.dumps({**GOOD, "rollout_id": "../r0"}).encode(),
    "an id of 129 characters": json.dumps({**GOOD, "rollout_id": "r" * 129}).encode(),
    "an id with a line feed": json.dumps({**GOOD, "rollout_id": "r0\n"}).encode(),
    "a token beyond int32": json.dumps(
        {**GOOD, "turns": [{**TURN, "prompt_token_ids": [1 << 31]}]}
    ).encode(),
    "a token that is a float": json.dumps(
        {**GOOD, "turns": [{**TURN, "prompt_token_ids": [1.5]}]}
    ).encode(),
    "a token that is true": json.dumps(
        {**GOOD, "turns": [{**TURN, "prompt_token_ids": [True]}]}
    ).encode(),
    "no logprobs": json.dumps(
        {**GOOD, "turns": [{k: v for k, v in TURN.items() if k != "logprobs"}]}
    ).encode(),
    "a negative prompt start": json.dumps(
        {**GOOD, "turns": [{**TURN, "routed_experts_prompt_start": -1}]}
    ).encode(),
    "no choices": json.dumps({**GOOD, "turns": [{**TURN, "choice_count": 0}]}).encode(),
    "a segment of an unknown field": json.dumps(
        {**GOOD, "turns": [{**TURN, "payload_segments": [{"field": "weights"}]}]}
    ).encode(),
}


@pytest.mark.parametrize("body", JSON_BODIES.values(), ids=JSON_BODIES.keys())
async def test_a_body_that_is_no_rollout_is_refused_and_changes_nothing(
    bench: Bench, body: bytes
) -> None:
    answer = await bench.http.post(
        "/v1/rollouts", content=body, headers={"content-type": "application/json"}
    )
    problem = assert_problem(answer, 422, "invalid_request")
    assert problem["faults"]
    assert len(answer.content) < 10_000
    await still_takes_the_good_one(bench)


WIRE_TURN: dict[str, Any] = {
    "request_id": "r0.t0",
    "prompt_token_ids": b"\1\0\0\0",
    "completion_token_ids": b"\2\0\0\0",
    "logprobs": b"\0\0\0\0",
}
WIRE: dict[str, Any] = {
    "rollout_id": "r0",
    "status": "completed",
    "reward": 1.0,
    "turns": [WIRE_TURN],
}
PACKED = msgspec.msgpack.encode(WIRE)
BINARY_BODIES = {
    "empty": b"",
    "truncated": PACKED[:-3],
    "trailing bytes": PACKED + b"\0",
    "not msgpack": b"\xc1",
    "not utf-8": msgspec.msgpack.encode({**WIRE, "rollout_id": "XX"}).replace(b"XX", b"\xff\xff"),
    "nested too deep": b"\x91" * 100_000,
    "a string for bytes": msgspec.msgpack.encode(
        {**WIRE, "turns": [{**WIRE_TURN, "logprobs": "abcd"}]}
    ),
    "a list for bytes": msgspec.msgpack.encode(
        {**WIRE, "turns": [{**WIRE_TURN, "prompt_token_ids": [1]}]}
    ),
    "an unknown member": msgspec.msgpack.encode({**WIRE, "rewards": 1}),
    "an id with a slash": msgspec.msgpack.encode({**WIRE, "rollout_id": "a/b"}),
    "an id with a line feed": msgspec.msgpack.encode({**WIRE, "rollout_id": "r0\n"}),
    "an unknown status": msgspec.msgpack.encode({**WIRE, "status": "done"}),
    "a huge array announced": b"\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("body", BINARY_BODIES.values(), ids=BINARY_BODIES.keys())
async def test_a_binary_body_that_is_no_rollout_is_refused_and_changes_nothing(
    bench: Bench, body: bytes
) -> None:
    answer = await bench.http.post(
        "/v1/rollouts", content=body, headers={"content-type": ROLLOUT_CONTENT_TYPE}
    )
    assert_problem(answer, 422, "invalid_request")
    await still_takes_the_good_one(bench)


@pytest.mark.parametrize("kind", ["text/plain", "", "application/msgpack"])
async def test_another_content_type_is_refused(bench: Bench, kind: str) -> None:
    answer = await bench.http.post("/v1/rollouts", content=b"{}", headers={"content-type": kind})
    assert_problem(answer, 415, "unsupported_form")


async def test_a_body_over_the_limit_is_refused(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False, body_bytes_max=2000) as bench:
        body = {**GOOD, "turns": [plain_turn("r0.t0", [1] * 2000, [3])]}
        answer = await bench.http.post("/v1/rollouts", json=body)
        assert_problem(answer, 413, "body_too_large")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"rollout_id": "r", "group_id": "g", "group_size": 0},
        {"rollout_id": "r", "group_id": "g", "group_size": "2"},
        {"rollout_id": "r/..", "group_id": "g", "group_size": 2},
        {"rollout_id": "r", "group_id": "", "group_size": 2},
        {"rollout_id": "r", "group_id": "g", "group_size": 2, "k": 1},
    ],
)
async def test_a_malformed_lease_is_refused(bench: Bench, body: dict[str, Any]) -> None:
    assert_problem(await bench.http.post("/v1/leases", json=body), 422, "invalid_request")


@pytest.mark.parametrize("body", [{}, {"policy_version": -1}, {"policy_version": 1.5}, {"x": 1}])
async def test_a_malformed_policy_version_is_refused(bench: Bench, body: dict[str, Any]) -> None:
    assert_problem(await bench.http.put("/v1/policy-version", json=body), 422, "invalid_request")


async def test_what_is_not_there_is_a_404(bench: Bench) -> None:
    assert_problem(await bench.http.get("/v1/leases/none"), 404, "lease_unknown")
    assert_problem(await bench.http.delete("/v1/leases/none"), 404, "lease_unknown")
    assert_problem(await bench.http.get("/v1/rollouts/none"), 404, "rollout_unknown")
    assert_problem(await bench.http.delete("/v1/rollouts/none"), 404, "rollout_unknown")
    assert_problem(await bench.http.get("/v1/steps/7"), 404, "step_unknown")
    assert_problem(await bench.http.post("/v1/admin/sweep"), 409, "no_payload_root")
    answer = await bench.http.get("/v1/files", params={"file": "v0/run-1/../x.sbp"})
    assert_problem(answer, 422, "invalid_file_name")
