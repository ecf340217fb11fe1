"""Groups, steps and staleness through the service."""

from pathlib import Path
from typing import Any

import pytest

from tests.services.orchestrator.support import (
    Bench,
    assert_problem,
    files_of,
    orchestrator,
    plain_turn,
)


def turn_of(name: str, token: int = 9, **more: Any) -> dict[str, Any]:
    return plain_turn(f"{name}.t0", [1, 2], [token], **more)


async def lease_group(bench: Bench, *names: str, size: int | None = None) -> None:
    for name in names:
        await bench.lease(name, "g", size=size or len(names))


def advantages_of(bench: Bench, step: int) -> dict[str, float]:
    """By rollout, the advantage of the trained token of each sample in a shipped step."""
    found = {}
    for batch in bench.feed.steps[step].grid[0]:
        column = batch.advantages.expand()
        for span in batch.spans:
            if span.sample_id is not None:
                found[span.sample_id.split(".")[0]] = float(column[span.start + span.length - 1])
    return found


async def test_a_group_is_packed_when_it_is_complete_with_its_relative_advantages(
    tmp_path: Path,
) -> None:
    async with orchestrator(tmp_path, by_handle=False, step_rollouts=3) as bench:
        await lease_group(bench, "a", "b", "c")
        await bench.deliver("b", turn_of("b"), reward=1.0)
        await bench.deliver("c", turn_of("c"), reward=3.0)
        assert bench.feed.taken == []
        view = (await bench.http.get("/v1/rollouts/b")).json()
        assert view["state"] == "waiting"
        receipt = (await bench.deliver("a", turn_of("a"), reward=2.0)).json()
        assert receipt["state"] in {"ready", "packed"}
        await bench.until(lambda: bench.feed.taken == [1], "the step is shipped")
        assert advantages_of(bench, 1) == {"a": 0.0, "b": -1.0, "c": 1.0}


async def test_failed_members_leave_the_group_and_their_files_go_at_once(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, step_rollouts=2) as bench:
        await lease_group(bench, "a", "b", "c", "d")
        failed = await bench.write("b.t0", [1, 2], [9])
        receipt = (await bench.deliver("b", failed, status="failed")).json()
        assert receipt["dropped"] == {"failed": 1}
        await bench.until(lambda: not bench.on_disk(), "the failed rollout's file is deleted")
        lease = await bench.lease("c", "g", size=4)
        await bench.http.delete(f"/v1/leases/{lease['lease_id']}")
        await bench.deliver("a", turn_of("a"), reward=1.0)
        await bench.deliver("d", turn_of("d"), reward=2.0)
        await bench.until(lambda: bench.feed.taken == [1], "the rest is shipped")
        assert advantages_of(bench, 1) == {"a": -0.5, "d": 0.5}


@pytest.mark.parametrize("status", ["failed", "aborted", "cancelled"])
async def test_work_that_did_not_complete_is_dropped_with_its_status(
    tmp_path: Path, status: str
) -> None:
    async with orchestrator(tmp_path, by_handle=False) as bench:
        await bench.lease("a")
        receipt = (await bench.deliver("a", status=status)).json()
        assert receipt["dropped"] == {status: 1}
        metric = f'orchestrator_rollouts_dropped_total{{reason="{status}"}}'
        assert await bench.metric(metric) == 1


async def test_a_group_of_failures_ships_nothing(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False) as bench:
        await lease_group(bench, "a", "b")
        await bench.deliver("a", status="aborted")
        await bench.deliver("b", status="failed")
        assert (await bench.run())["groups_open"] == 0
        assert bench.feed.taken == []


async def test_an_own_advantage_waits_for_nobody(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False) as bench:
        await lease_group(bench, "a", "b")
        await bench.deliver("a", turn_of("a"), advantage=-0.25)
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        await bench.deliver("b", turn_of("b", advantages=[0.75]), reward=None)
        await bench.until(lambda: bench.feed.taken == [1, 2], "so is the other")
        assert advantages_of(bench, 1) == {"a": -0.25}
        assert advantages_of(bench, 2) == {"b": 0.75}


async def test_groups_without_a_difference_are_filtered_by_a_setting(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, filter_zero_advantage=True) as bench:
        await lease_group(bench, "a", "b")
        for name in ("a", "b"):
            await bench.deliver(name, await bench.write(f"{name}.t0", [1, 2], [9]), reward=0.5)
        await bench.until(lambda: not bench.on_disk(), "their files are deleted")
        view = (await bench.http.get("/v1/rollouts/a")).json()
        assert view["dropped"] == {"filtered": 1}


async def test_an_abandoned_group_is_closed_by_its_deadline(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False, group_timeout_s=60) as bench:
        await lease_group(bench, "a", "b", size=3)
        await bench.deliver("a", turn_of("a"), reward=1.0)
        await bench.deliver("b", turn_of("b"), reward=2.0)
        bench.clock.now_s += 61
        await bench.until(lambda: bench.feed.taken == [1, 2], "what was delivered is shipped")


async def test_a_lease_that_is_never_delivered_expires_and_frees_its_group(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, lease_timeout_s=60) as bench:
        lease = await bench.lease("a", "g", size=2, session_id="session-a")
        await bench.lease("b", "g", size=2)
        turn = await bench.write("a.t0", [1, 2], [9])
        renew = f"/v1/leases/{lease['lease_id']}/renew"
        bench.clock.now_s += 50
        assert (await bench.http.post(renew, json={"files": list(files_of(turn))})).is_success
        await bench.deliver("b", turn_of("b"), reward=1.0)
        bench.clock.now_s += 50
        await bench.service.tick()
        assert bench.on_disk(), "the lease was renewed"
        bench.clock.now_s += 11
        await bench.until(lambda: not bench.on_disk(), "the lease's files are deleted")
        await bench.until(lambda: bench.proxy.discarded == ["session-a"], "the proxy is told")
        await bench.until(lambda: bench.feed.taken == [1], "the group went on")
        receipt = (await bench.deliver("a", turn)).json()
        assert receipt["dropped"] == {"expired": 1}
        assert_problem(await bench.http.post(renew, json={}), 409, "lease_ended")


async def test_renewing_refuses_files_of_others(tmp_path: Path) -> None:
    async with orchestrator(tmp_path) as bench:
        lease = await bench.lease("a")
        for file in ("v0/run-2/00/x-0123456789abcdef.sbp", "../x", "v1/run-1/00/x.sbp"):
            answer = await bench.http.post(
                f"/v1/leases/{lease['lease_id']}/renew", json={"files": [file]}
            )
            assert_problem(answer, 422, "invalid_file_name")


async def test_steps_follow_dispatch_order_in_deterministic_mode(tmp_path: Path) -> None:
    names = [f"r{index}" for index in range(6)]
    async with orchestrator(
        tmp_path, by_handle=False, step_rollouts=2, deterministic=True, steps_ahead_max=9
    ) as bench:
        for name in names:
            await bench.lease(name)
        for name in ("r5", "r3", "r1", "r2"):
            await bench.deliver(name, turn_of(name))
        await bench.service.tick()
        assert bench.feed.taken == []
        await bench.deliver("r0", status="failed")
        await bench.until(lambda: bench.feed.taken == [1], "r0 failed, so r1 and r2 may go")
        await bench.deliver("r4", turn_of("r4"))
        await bench.until(lambda: bench.feed.taken == [1, 2], "r3 and r4 are shipped")
        steps = (await bench.http.get("/v1/steps")).json()["steps"]
    assert [step["rollout_ids"] for step in steps] == [["r1", "r2"], ["r3", "r4"]]


async def test_a_step_may_be_a_number_of_tokens(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False, step_tokens=5) as bench:
        for name in ("a", "b"):
            await bench.lease(name)
            assert bench.feed.taken == []
            await bench.deliver(name, turn_of(name))
        await bench.until(lambda: bench.feed.taken == [1], "two rollouts of three tokens fill it")


async def test_stale_rollouts_are_dropped_and_leases_that_can_only_be_late_cancelled(
    tmp_path: Path,
) -> None:
    async with orchestrator(tmp_path, max_off_policy_steps=0) as bench:
        await lease_group(bench, "slow", "never", size=2)
        waits = await bench.lease("late", session_id="late")
        await bench.lease("first")
        await bench.deliver("slow", await bench.write("slow.t0", [1, 2], [9]))
        await bench.deliver("first", turn_of("first"))
        await bench.until(lambda: bench.feed.taken == [1], "step 1 is shipped")
        # The next step is 2, and v0 may train in step 1 at most.
        await bench.until(lambda: not bench.on_disk(), "the waiting rollout's file is deleted")
        slow = (await bench.http.get("/v1/rollouts/slow")).json()
        assert slow["dropped"] == {"stale": 1}
        ended = (await bench.http.get(f"/v1/leases/{waits['lease_id']}")).json()
        assert (ended["state"], ended["reason"]) == ("cancelled", "stale")
        await bench.until(lambda: bench.proxy.discarded == ["late"], "the proxy is told")
        receipt = (await bench.deliver("late", await bench.write("late.t0", [1], [2]))).json()
        assert receipt["dropped"] == {"stale": 1}
        await bench.until(lambda: not bench.on_disk(), "its file is deleted")
        refused = await bench.http.post(
            "/v1/leases", json={"rollout_id": "new", "group_id": "n", "group_size": 1}
        )
        assert_problem(refused, 503, "policy_behind")
        assert refused.headers["retry-after"] == "1"
        bench.proxy.applied = 1
        await bench.until(lambda: bench.service.book.policy_version == 1, "v1 is applied")
        assert (await bench.lease("new"))["policy_version"] == 1


async def test_a_rollout_keeps_its_version_when_weights_change_under_it(tmp_path: Path) -> None:
    async with orchestrator(tmp_path) as bench:
        await bench.lease("r0")
        await bench.http.put("/v1/policy-version", json={"policy_version": 3})
        bench.proxy.applied = 3
        await bench.deliver("r0", await bench.write("r0.t0", [1, 2], [9]))
        assert (await bench.lease("r1"))["policy_version"] == 3
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        assert bench.feed.steps[1].grid[0][0].spans[0].policy_version == 0


async def test_one_file_of_several_choices_stays_until_the_group_has_ended(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, step_rollouts=9) as bench:
        await lease_group(bench, "a", "b", "c")
        shared = await bench.write("shared", [1, 2], [9], choice_count=3)
        [file] = files_of(shared)
        await bench.deliver("a", shared, status="aborted")
        kept = (await bench.http.get("/v1/files", params={"file": file})).json()["files"][0]
        assert kept["kept_by"] == ["group g"]
        await bench.deliver("b", shared)
        kept = (await bench.http.get("/v1/files", params={"file": file})).json()["files"][0]
        assert kept["kept_by"] == ["group g", "rollout b"]
        await bench.deliver("c", status="failed")
        kept = (await bench.http.get("/v1/files", params={"file": file})).json()["files"][0]
        assert kept["kept_by"] == ["rollout b"]
        await bench.http.delete("/v1/rollouts/b")
        await bench.until(lambda: not bench.on_disk(), "nothing refers to it any more")


async def test_what_was_deleted_is_never_trained_on(tmp_path: Path) -> None:
    async with orchestrator(tmp_path) as bench:
        await bench.lease("a")
        await bench.lease("b")
        turn = await bench.write("shared", [1, 2], [9])
        await bench.deliver("a", turn, status="aborted")
        receipt = (await bench.deliver("b", turn)).json()
        assert receipt["dropped"] == {"files_gone": 1}


async def test_turns_that_do_not_train_give_their_files_back(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, seq_len=8) as bench:
        await bench.lease("r0")
        first = await bench.write("r0.t0", [1, 2, 3], [4, 5])
        beyond = await bench.write("r0.t1", [1, 2, 3, 4, 5, 6, 7, 8], [9, 10], start=4)
        answer = await bench.deliver("r0", first, beyond)
        assert answer.json()["tally"]["samples_truncated"] == 1
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        assert bench.on_disk() == files_of(first) | files_of(beyond), "rows 4 to 7 are of turn two"
        await bench.lease("r1")
        whole = await bench.write("r1.t0", [1] * 8, [9, 10])
        receipt = (await bench.deliver("r1", whole)).json()
        assert receipt["dropped"] == {"no_trainable_tokens": 1}
        await bench.until(lambda: not files_of(whole) & bench.on_disk(), "its file is deleted")


async def test_a_hole_drops_the_routing_or_is_marked_by_a_setting(tmp_path: Path) -> None:
    for keep in (False, True):
        async with orchestrator(
            tmp_path, keep_rows_around_holes=keep, start="fresh", start_id=str(keep)
        ) as bench:
            await bench.lease("r0")
            # The engine was asked for rows from 2 on, and nobody has rows 0 and 1.
            turn = await bench.write("r0.t0", [1, 2, 3], [4, 5], start=2)
            tally = (await bench.deliver("r0", turn)).json()["tally"]
            assert tally["samples_with_holes"] == 1
            assert tally["routing_rows"] == (2 if keep else 0)
            await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
            fields = {s.field for s in bench.feed.steps[1].grid[0][0].segments}
            assert fields == ({"routed_experts", "sampling_mask"} if keep else {"sampling_mask"})
            assert await bench.metric("orchestrator_samples_with_holes_total") == 1
            view = (await bench.http.get("/v1/steps/1")).json()
            assert view["routing_valid_fraction"] == (0.5 if keep else 0.0)


async def test_a_step_with_too_few_valid_rows_stops_the_run_visibly(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, routing_valid_fraction_min=0.9) as bench:
        await bench.lease("r0")
        await bench.lease("open")
        await bench.deliver("r0", turn_of("r0"))
        await bench.until(lambda: bench.service.book.run.is_terminal, "the run stops")
        run = await bench.run()
        assert run["phase"] == "stopped"
        assert "0.000 of its routing rows" in run["reason"]
        assert run["leases_open"] == 0
        assert bench.feed.taken == []
        assert_problem(await bench.http.get("/readyz"), 503, "not_ready")
        refused = await bench.http.post(
            "/v1/leases", json={"rollout_id": "x", "group_id": "x", "group_size": 1}
        )
        assert_problem(refused, 409, "run_stopped")
        assert_problem(await bench.http.post("/v1/admin/resume"), 409, "run_stopped")
        assert await bench.metric('orchestrator_phase{phase="stopped"}') == 1
        await bench.until(lambda: bench.feed.has_ended, "the ranks are told that nothing comes")
