"""How much a rollout may consist of: each bound from both sides."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.kit.turns import TURNS_MAX
from services.orchestrator import turns
from services.orchestrator.wire import ROLLOUT_CONTENT_TYPE
from tests.services.orchestrator.support import assert_problem, orchestrator, plain_turn

PROMPT, COMPLETION = [1, 2, 3], [4, 5, 6]  # the writer makes two segments of them


@pytest.mark.parametrize(
    ("bound", "exact", "code"),
    [("SEGMENTS_PER_TURN_MAX", 2, "invalid_segment"), ("TOKENS_PER_TURN_MAX", 6, "malformed_turn")],
)
@pytest.mark.parametrize("is_over", [False, True])
async def test_a_turn_has_so_many_parts_and_no_more(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bound: str,
    exact: int,
    code: str,
    is_over: bool,
) -> None:
    monkeypatch.setattr(turns, bound, exact - is_over)
    async with orchestrator(tmp_path, with_feed=False) as bench:
        await bench.lease("r0")
        answer = await bench.deliver("r0", await bench.write("r0.t0", PROMPT, COMPLETION))
        if is_over:
            problem = assert_problem(answer, 422, code)
            assert str(exact - 1) in problem["detail"]
            await bench.until(lambda: not bench.on_disk(), "its file goes")
        else:
            assert answer.status_code == 202, answer.text


@pytest.mark.parametrize("is_binary", [False, True])
async def test_a_rollout_of_too_many_turns_is_refused_before_any_is_looked_at(
    tmp_path: Path, is_binary: bool
) -> None:
    async with orchestrator(tmp_path, by_handle=False, with_feed=False) as bench:
        await bench.lease("r0")
        turn: dict[str, Any] = plain_turn("r0.t0", [1], [2])
        body = {"rollout_id": "r0", "status": "completed", "reward": 1.0}
        many = {**body, "turns": [turn] * (TURNS_MAX + 1)}
        if is_binary:
            empty = {"request_id": "q", "prompt_token_ids": b"", "completion_token_ids": b""}
            packed = {**many, "turns": [{**empty, "logprobs": b""}] * (TURNS_MAX + 1)}
            answer = await bench.http.post(
                "/v1/rollouts",
                content=msgspec.msgpack.encode(packed),
                headers={"content-type": ROLLOUT_CONTENT_TYPE},
            )
        else:
            answer = await bench.http.post("/v1/rollouts", json=many)
        problem = assert_problem(answer, 422, "invalid_request")
        assert str(TURNS_MAX) in problem["detail"], problem
        assert (await bench.deliver("r0", turn)).status_code == 202, "the lease is still open"
