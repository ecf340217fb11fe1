"""The feed service over HTTP with real ranks over ZMQ: steps in, acknowledgements out."""

import asyncio
import re
from typing import Any

import pytest

from sideband.feed.codec import encode_step
from sideband.ids import RunId
from tests.services.trainer_feed.serving import (
    BINARY,
    WAIT_S,
    commit_one,
    put,
    rank,
    running,
    step_of,
    train,
)
from tests.unit.feed.builders import make_step


async def test_steps_go_in_over_http_and_are_acknowledged_by_every_rank() -> None:
    async with running() as (client, endpoint):
        assert (await put(client, step_of(1))).status_code == 201
        ranks = [asyncio.create_task(asyncio.to_thread(train, endpoint, cp)) for cp in range(2)]
        receipt = (await put(client, step_of(2))).json()
        assert receipt["is_new"]
        assert receipt["micro_batch_count"] == step_of(2).micro_batch_count
        assert (await client.post("/v1/end")).json()["state"] in {"ending", "drained"}
        drained = (await client.post("/v1/admin/drain", params={"timeout_s": WAIT_S})).json()
        assert drained == {
            "state": "drained",
            "steps_held": [],
            "waiting_for": [],
            "is_complete": True,
        }
        seen = await asyncio.gather(*ranks)
        assert {place[0] for place in seen[0]} == {1, 2}
        acknowledged = (await client.get("/v1/acknowledgements")).json()
        assert acknowledged["committed_step"] == 2
        assert acknowledged["ranks"] == [
            {"global_rank": 0, "committed_step": 2},
            {"global_rank": 1, "committed_step": 2},
        ]
        metrics = (await client.get("/metrics")).text
        assert "feed_steps_committed_total 2.0" in metrics
        assert "feed_committed_step 2.0" in metrics
        assert "feed_ranks_expected 2.0" in metrics
        assert re.search(r"feed_loop_delay_seconds_count [1-9]", metrics)


async def test_a_repeat_is_told_apart_from_another_content() -> None:
    async with running() as (client, _):
        assert (await put(client, step_of(1))).status_code == 201
        again = await put(client, step_of(1))
        assert (again.status_code, again.json()["is_new"]) == (200, False)
        other = await put(client, step_of(1, seq_len=64))
        assert (other.status_code, other.json()["code"]) == (409, "step_conflict")


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"run_id": RunId("run-b")}, 409, "other_run"),
        ({"dp_size": 2}, 409, "other_grid"),
        ({"cp_size": 4}, 409, "other_grid"),
        ({"layout": "zigzag"}, 409, "other_grid"),
        ({"step": 4}, 409, "step_out_of_order"),
    ],
)
async def test_a_step_that_does_not_fit_is_refused_by_name(
    changes: dict[str, Any], status: int, code: str
) -> None:
    async with running() as (client, _):
        await put(client, step_of(1))
        refused = await put(client, step_of(**{"number": 2, **changes}))
        assert (refused.status_code, refused.json()["code"]) == (status, code)
        assert refused.headers["content-type"] == "application/problem+json"
        assert [held["step"] for held in (await client.get("/v1/steps")).json()["steps"]] == [1]


async def test_a_body_that_is_no_step_names_the_element() -> None:
    async with running() as (client, _):
        body = encode_step(step_of(1))
        wrong = await client.put("/v1/steps/1", content=body, headers={"content-type": "a/b"})
        assert (wrong.status_code, wrong.json()["code"]) == (415, "wrong_content_type")
        torn = await client.put("/v1/steps/1", content=body[:-3], headers=BINARY)
        assert (torn.status_code, torn.json()["element"]) == (422, "body")
        newer = body.replace(b"sideband.step\x01", b"sideband.step\x02")
        later = await client.put("/v1/steps/1", content=newer, headers=BINARY)
        assert (later.status_code, later.json()["code"]) == (422, "unreadable_step")
        moved = await client.put("/v1/steps/2", content=body, headers=BINARY)
        assert (moved.status_code, moved.json()["element"]) == (422, "step")
        assert (await client.get("/v1/steps")).json()["steps"] == []


async def test_a_full_or_paused_feed_says_when_to_come_again() -> None:
    async with running(steps_held_max=1) as (client, _):
        assert (await client.post("/v1/admin/pause")).json()["state"] == "paused"
        paused = await put(client, step_of(1))
        assert (paused.status_code, paused.json()["code"]) == (503, "feed_paused")
        assert (await client.post("/v1/admin/resume")).json()["state"] == "waiting_for_ranks"
        assert (await put(client, step_of(1))).status_code == 201
        full = await put(client, step_of(2))
        assert (full.status_code, full.json()["code"]) == (503, "feed_full")
        assert full.headers["retry-after"] == "1"
        assert full.json()["steps_held"] == 1


async def test_past_its_quota_the_feed_names_the_rank_that_is_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with running(steps_held_max=1) as (client, endpoint):
        await put(client, step_of(1))
        present, gone = [await asyncio.to_thread(rank, endpoint, cp) for cp in range(2)]
        await asyncio.gather(*(asyncio.to_thread(r.next_micro_batch) for r in (present, gone)))
        full = (await put(client, step_of(2))).json()
        assert (full["status"], full["blocking"]) == (503, [])  # all are there: only slow
        await asyncio.to_thread(gone.close)
        for _ in range(2):
            full_again = await put(client, step_of(2))
            assert full_again.headers["retry-after"] == "1"
            assert full_again.json()["blocking"] == [1]
            assert "not there: rank 1" in full_again.json()["detail"]
        assert capsys.readouterr().out.count("intake_blocked") == 1  # one alarm, not one a try
        metrics = (await client.get("/metrics")).text
        assert "feed_intake_blocked_total 2.0" in metrics
        assert "feed_blocking_ranks 1.0" in metrics
        tasks = [asyncio.to_thread(commit_one, endpoint, cp) for cp in range(2)]
        await asyncio.gather(asyncio.to_thread(present.close), *tasks)
        assert (await put(client, step_of(2))).status_code == 201
        assert "feed_blocking_ranks 2.0" in (await client.get("/metrics")).text


async def test_nothing_follows_the_end() -> None:
    async with running() as (client, _):
        await put(client, step_of(1))
        assert (await client.post("/v1/end")).json()["state"] == "ending"
        late = await put(client, step_of(2))
        assert (late.status_code, late.json()["code"]) == (409, "feed_ended")


async def test_a_drain_ends_at_its_deadline_and_names_who_is_missing() -> None:
    async with running() as (client, endpoint):
        await put(client, step_of(1))
        one = await asyncio.to_thread(rank, endpoint, 0)
        try:
            drained = await client.post("/v1/admin/drain", params={"timeout_s": 0.3})
            assert drained.json()["is_complete"] is False
            assert drained.json()["waiting_for"] == [1]
            assert drained.json()["steps_held"] == [1]
        finally:
            await asyncio.to_thread(one.close)


async def test_ranks_and_steps_show_who_has_what() -> None:
    async with running() as (client, endpoint):
        await put(client, step_of(1))
        ranks = [await asyncio.to_thread(rank, endpoint, cp) for cp in range(2)]
        try:
            batches = await asyncio.gather(
                *(asyncio.to_thread(one.next_micro_batch) for one in ranks)
            )
            assert all(batch is not None for batch in batches)
            shown = (await client.get("/v1/ranks")).json()
            assert [one["is_connected"] for one in shown["ranks"]] == [True, True]
            assert [one["cp_rank"] for one in shown["ranks"]] == [0, 1]
            assert shown["ranks"][0]["delivered"][0] == 1 or shown["ranks"][0]["delivered"] == [
                2,
                0,
            ]
            step = (await client.get("/v1/steps/1")).json()
            assert step["uncommitted_ranks"] == [0, 1]
            assert (await client.get("/v1/steps/9")).json()["code"] == "unknown_step"
        finally:
            await asyncio.gather(*(asyncio.to_thread(one.close) for one in ranks))
        gone = (await client.get("/v1/ranks")).json()
        assert [one["is_connected"] for one in gone["ranks"]] == [False, False]
        assert gone["waiting_for"] == [0, 1]


async def test_a_failed_step_is_shown_with_rank_and_reason() -> None:
    async with running(cp_size=1) as (client, endpoint):
        await put(client, make_step(step=1, dp_size=1, cp_size=1))
        one = await asyncio.to_thread(rank, endpoint, 0)
        try:
            with pytest.raises(Exception, match="payload_root"):
                await asyncio.to_thread(one.next_micro_batch)
            await asyncio.to_thread(one.close)  # it leaves only when its failure is known
            acks = (await client.get("/v1/acknowledgements")).json()
            assert acks["failed"]["step"] == 1
            assert acks["failed"]["global_rank"] == 0
            assert "payload_root" in acks["failed"]["reason"]
            assert (await client.post("/v1/admin/resume")).json()["state"] == "failed"
            assert (await client.get("/metrics")).text.count("feed_steps_failed_total 1.0") == 1
        finally:
            await asyncio.to_thread(one.close)
