"""Steps reach the feed whatever it does, and every run ends."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.orchestrator.stubs import refusal
from tests.services.orchestrator.support import (
    Bench,
    assert_problem,
    files_of,
    orchestrator,
    plain_turn,
)


async def collect(bench: Bench, *names: str) -> None:
    for name in names:
        await bench.lease(name)
        answer = await bench.deliver(name, plain_turn(f"{name}.t0", [1, 2], [3]))
        assert answer.json()["accepted"] is True, answer.text


async def test_a_step_is_sent_again_until_the_feed_takes_it(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False) as bench:
        bench.feed.refusals = [
            refusal(503, "feed_full", **{"retry-after": "0"}),
            httpx.Response(500, text="broken"),
        ]
        await collect(bench, "r0")
        await bench.until(lambda: bench.feed.taken == [1], "the step is taken")
        assert (await bench.run())["phase"] == "running"


async def test_a_feed_that_is_down_is_waited_for(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False) as bench:
        bench.feed.is_down = True
        await collect(bench, "r0")
        await bench.until(lambda: 1 in bench.service.book.steps, "the step is built")
        await asyncio.sleep(0.05)
        bench.feed.is_down = False
        await bench.until(lambda: bench.feed.taken == [1], "the step is taken")
        assert await bench.metric("orchestrator_delivery_failures_total") > 0


async def test_a_step_that_the_feed_will_never_take_stops_the_run(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False) as bench:
        bench.feed.refusals = [refusal(409, "step_conflict")]
        await collect(bench, "r0")
        await bench.until(lambda: bench.service.book.run.is_terminal, "the run stops")
        assert "409 step_conflict" in (await bench.run())["reason"]


async def test_a_feed_of_another_run_stops_the_run(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False) as bench:
        bench.feed.run_id = "run-2"
        await collect(bench, "r0")
        await bench.until(lambda: bench.service.book.run.is_terminal, "the run stops")
        assert "run-2" in (await bench.run())["reason"]


async def test_what_the_feed_lost_is_sent_again_in_order_before_anything_newer(
    tmp_path: Path,
) -> None:
    async with orchestrator(tmp_path, by_handle=False, steps_ahead_max=9) as bench:
        await collect(bench, "r0", "r1", "r2")
        await bench.until(lambda: bench.feed.taken == [1, 2, 3], "three steps are taken")
        bench.feed.commit(1)
        await bench.until(
            lambda: bench.service.book.steps[1].state == "acknowledged", "step 1 is done"
        )
        bench.feed.is_down = True
        bench.feed.forget()
        await collect(bench, "r3")
        bench.feed.is_down = False
        await bench.until(lambda: len(bench.feed.taken) == 6, "the lost steps are sent again")
        assert bench.feed.taken == [1, 2, 3, 2, 3, 4]
        bench.feed.commit(4)
        await bench.until(
            lambda: bench.service.book.steps[4].state == "acknowledged", "all is done"
        )
        assert await bench.metric("orchestrator_steps_resent_total") == 2


async def test_a_feed_that_restarts_between_poll_and_put_takes_nothing_out_of_order(
    tmp_path: Path,
) -> None:
    async with orchestrator(tmp_path, by_handle=False, steps_ahead_max=9) as bench:
        await collect(bench, "r0", "r1")
        await bench.until(lambda: bench.feed.taken == [1, 2], "two steps are taken")
        bench.feed.restarts_before_put = True
        await collect(bench, "r2")
        await bench.until(lambda: len(bench.feed.taken) == 5, "the lost steps are sent first")
        assert bench.feed.taken == [1, 2, 1, 2, 3]
        assert (await bench.run())["phase"] == "running"


async def test_only_so_many_steps_are_built_ahead_of_the_ranks(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False, steps_ahead_max=2) as bench:
        await collect(bench, "r0", "r1", "r2")
        await bench.until(lambda: bench.feed.taken == [1, 2], "two steps are taken")
        await asyncio.sleep(0.05)
        assert (await bench.run())["rollouts_held"] == 1
        bench.feed.commit(1)
        await bench.until(lambda: bench.feed.taken == [1, 2, 3], "the third follows")


async def test_bounds_on_leases_and_held_rollouts_are_503_with_retry_after(tmp_path: Path) -> None:
    bounds: dict[str, Any] = {"leases_open_max": 2, "rollouts_held_max": 1, "step_rollouts": 9}
    async with orchestrator(tmp_path, by_handle=False, **bounds) as bench:
        await bench.lease("r0")
        await bench.lease("r1")
        body = {"rollout_id": "r2", "group_id": "r2", "group_size": 1}
        answer = await bench.http.post("/v1/leases", json=body)
        assert_problem(answer, 503, "too_many_leases")
        assert answer.headers["retry-after"]
        await bench.deliver("r0", plain_turn("r0.t0", [1, 2], [3]))
        answer = await bench.deliver("r1", plain_turn("r1.t0", [1, 2], [3]))
        assert_problem(answer, 503, "too_many_rollouts")
        assert answer.headers["retry-after"]
        assert_problem(await bench.http.post("/v1/leases", json=body), 503, "too_many_rollouts")
        await bench.http.delete("/v1/rollouts/r0")
        assert (await bench.deliver("r1", plain_turn("r1.t0", [1, 2], [3]))).status_code == 202


async def test_a_lease_is_idempotent_by_rollout(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False) as bench:
        first = await bench.lease("r0", "g", size=2)
        bench.proxy.applied = 4
        await bench.until(lambda: bench.service.book.policy_version == 4, "v4 is applied")
        assert await bench.lease("r0", "g", size=2) == first
        other = {"rollout_id": "r0", "group_id": "h", "group_size": 2}
        assert_problem(await bench.http.post("/v1/leases", json=other), 409, "lease_conflict")
        for _ in range(2):
            ended = await bench.http.delete(f"/v1/leases/{first['lease_id']}")
            assert ended.json()["state"] == "aborted"
        assert (await bench.lease("r0", "g", size=2))["state"] == "aborted"


async def test_repeats_of_a_delivery_at_the_same_time_count_once(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, step_rollouts=9) as bench:
        await bench.lease("r0")
        turn = await bench.write("r0.t0", [1, 2], [3])
        answers = await asyncio.gather(*(bench.deliver("r0", turn) for _ in range(8)))
        assert {answer.status_code for answer in answers} == {202}
        assert len({answer.text for answer in answers}) == 1
        assert await bench.metric("orchestrator_samples_total") == 1
        assert bench.on_disk() == files_of(turn)


async def test_without_a_known_policy_version_nothing_is_dispatched(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False, with_proxy=False) as bench:
        body = {"rollout_id": "r0", "group_id": "g", "group_size": 1}
        assert_problem(await bench.http.post("/v1/leases", json=body), 503, "policy_unknown")
        assert_problem(await bench.http.get("/readyz"), 503, "not_ready")
        await bench.http.put("/v1/policy-version", json={"policy_version": 2})
        assert (await bench.lease("r0"))["policy_version"] == 2
        assert (await bench.http.get("/readyz")).status_code == 200
        view = (await bench.http.get("/v1/policy-version")).json()
        assert view == {"policy_version": 2, "highest_applied": 2}
        await bench.http.put("/v1/policy-version", json={"policy_version": 1})
        view = (await bench.http.get("/v1/policy-version")).json()
        assert view == {"policy_version": 1, "highest_applied": 2}


async def test_a_pause_stops_leases_and_nothing_else(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False) as bench:
        await bench.lease("r0")
        assert (await bench.http.post("/v1/admin/pause")).json()["phase"] == "paused"
        body = {"rollout_id": "r1", "group_id": "g", "group_size": 1}
        assert_problem(await bench.http.post("/v1/leases", json=body), 409, "run_paused")
        await bench.deliver("r0", plain_turn("r0.t0", [1, 2], [3]))
        await bench.until(lambda: bench.feed.taken == [1], "its step is shipped")
        assert (await bench.http.post("/v1/admin/resume")).json()["phase"] == "running"
        await bench.lease("r1")


async def test_a_drain_trains_what_is_there_ends_the_feed_and_leaves_no_file(
    tmp_path: Path,
) -> None:
    async with orchestrator(tmp_path, step_rollouts=4) as bench:
        await bench.lease("r0")
        await bench.lease("half", "g", size=2)
        await bench.deliver("half", await bench.write("half.t0", [1, 2], [3]))
        drained = await bench.http.post("/v1/admin/drain")
        assert drained.json()["phase"] == "draining"
        body = {"rollout_id": "r1", "group_id": "r1", "group_size": 1}
        assert_problem(await bench.http.post("/v1/leases", json=body), 409, "run_draining")
        await asyncio.sleep(0.03)
        assert not bench.feed.has_ended
        await bench.deliver("r0", await bench.write("r0.t0", [1, 2], [3]))
        await bench.until(lambda: bench.feed.taken == [1], "the partial step is shipped")
        await bench.until(lambda: bench.feed.has_ended, "the feed is told")
        assert (await bench.run())["waiting_for"] == "not every rank committed step 1"
        bench.feed.commit(1)
        await bench.until(
            lambda: bench.service.book.steps[1].state == "acknowledged", "the commit is known"
        )
        assert (await bench.run())["waiting_for"] == "v1 of step 1 was never applied"
        bench.proxy.applied = 1
        await bench.until(lambda: bench.service.book.run.is_terminal, "the run ends")
        run = await bench.run()
        assert (run["phase"], run["reason"]) == ("ended", "drained")
        await bench.until(lambda: not bench.on_disk(), "every file is deleted")
        assert_problem(await bench.http.post("/v1/leases", json=body), 409, "run_ended")
        assert (await bench.http.post("/v1/admin/drain")).json()["phase"] == "ended"


async def test_a_drain_may_drop_what_does_not_fill_a_step(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, step_rollouts=2, ship_last_partial_step=False) as bench:
        await collect(bench, "r0", "r1")
        await bench.lease("r2")
        await bench.deliver("r2", await bench.write("r2.t0", [1, 2], [3]))
        await bench.http.post("/v1/admin/drain")
        await bench.until(lambda: not bench.on_disk(), "the rest is dropped")
        await bench.until(lambda: bench.feed.has_ended, "the feed is told")
        assert bench.feed.taken == [1]


async def test_a_drain_cancels_leases_by_its_first_deadline_and_ends_by_its_second(
    tmp_path: Path,
) -> None:
    async with orchestrator(tmp_path) as bench:
        await bench.lease("never")
        await bench.lease("r0")
        turn = await bench.write("r0.t0", [1, 2], [3])
        await bench.deliver("r0", turn)
        await bench.until(lambda: bench.feed.taken == [1], "the step is shipped")
        await bench.http.post("/v1/admin/drain", json={"leases_s": 10, "deadline_s": 100})
        bench.clock.now_s += 11
        await bench.until(lambda: not bench.service.book.open_leases, "the lease is cancelled")
        bench.clock.now_s += 100
        await bench.until(lambda: bench.service.book.run.is_terminal, "the run ends")
        run = await bench.run()
        assert run["reason"] == "drain deadline: not every rank committed step 1"
        assert bench.on_disk() == files_of(turn), "a rank may still have to read it"
        bench.feed.commit(1)
        bench.proxy.applied = 1
        await bench.until(lambda: not bench.on_disk(), "late acknowledgements still count")


async def test_a_policy_that_never_comes_stops_the_run(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, policy_timeout_s=600) as bench:
        await bench.lease("r0")
        turn = await bench.write("r0.t0", [1, 2], [3])
        await bench.deliver("r0", turn)
        await bench.until(lambda: bench.feed.taken == [1], "the step is shipped")
        bench.feed.commit(1)
        await bench.until(
            lambda: bench.service.book.steps[1].state == "acknowledged", "the commit is known"
        )
        bench.clock.now_s += 599
        await bench.service.tick()
        assert (await bench.run())["phase"] == "running"
        bench.clock.now_s += 2
        await bench.until(lambda: bench.service.book.run.is_terminal, "the run stops")
        run = await bench.run()
        assert run["phase"] == "stopped"
        assert "v1 was not applied within 600 s" in run["reason"]
        assert bench.on_disk() == files_of(turn)


async def test_a_loop_that_crashes_stops_the_run_and_readiness_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("services.orchestrator.building.build", broken)
    async with orchestrator(tmp_path, by_handle=False) as bench:
        await bench.lease("r0")
        await bench.deliver("r0", plain_turn("r0.t0", [1, 2], [3]))
        await bench.until(lambda: bench.service.book.run.is_terminal, "the run stops")
        assert_problem(await bench.http.get("/readyz"), 503, "not_ready")


async def test_a_rollout_in_a_step_cannot_be_dropped(tmp_path: Path) -> None:
    async with orchestrator(tmp_path) as bench:
        await collect(bench, "r0")
        await bench.until(lambda: bench.feed.taken == [1], "the step is shipped")
        problem = assert_problem(await bench.http.delete("/v1/rollouts/r0"), 409, "rollout_in_step")
        assert problem["step"] == 1


async def test_the_feeds_failure_is_shown(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False) as bench:
        await collect(bench, "r0")
        await bench.until(lambda: bench.feed.taken == [1], "the step is shipped")
        bench.feed.failed = {"step": 1, "global_rank": 3, "reason": "rows could not be read"}
        await bench.until(lambda: bench.service.feed_failure is not None, "it is known")
        assert (await bench.run())["feed_failure"] == "step 1, rank 3: rows could not be read"
