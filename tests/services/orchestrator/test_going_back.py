"""The trainer goes back to an earlier checkpoint: the same steps again, or what is gone is said."""

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from sideband.feed.codec import encode_step
from tests.services.orchestrator.support import SETTLE_S, Bench, assert_problem, files_of
from tests.services.orchestrator.test_resume import World


async def collect(bench: Bench, name: str, **more: Any) -> dict[str, Any]:
    """Lease, write in the folder of the lease's version, deliver."""
    version = (await bench.lease(name))["policy_version"]
    turn = await bench.write(f"{name}.t0", [1, 2], [3], policy_version=version)
    answer = await bench.deliver(name, turn, **more)
    assert answer.status_code == 202, answer.text
    return turn


async def train(bench: Bench, *, steps: int, committed: int | None = None) -> list[dict[str, Any]]:
    """``steps`` steps of one rollout each, committed and applied; the turns by step."""
    turns = []
    for step in range(1, steps + 1):
        turns.append(await collect(bench, f"r{step}", advantage=step / 8))
        await bench.until(lambda s=step: s in bench.feed.taken, "it is shipped")  # type: ignore[misc]
        if committed is None or step <= committed:
            bench.feed.commit(step)
            bench.proxy.applied = step
            await bench.until(
                lambda s=step: bench.service.book.policy_version == s,  # type: ignore[misc]
                "its policy is applied",
            )
    return turns


async def go_back(bench: Bench, step: int, **more: Any) -> dict[str, Any]:
    answer = await bench.http.post("/v1/admin/go-back", json={"step": step, **more})
    assert answer.status_code == 200, answer.text
    record: dict[str, Any] = answer.json()
    return record


def sent(bench: Bench, *steps: int) -> dict[int, bytes]:
    return {step: encode_step(bench.feed.steps[step]) for step in steps}


async def test_steps_come_again_in_order_bitwise_and_their_files_go_in_the_end(
    tmp_path: Path,
) -> None:
    async with World(tmp_path, applied_steps_kept=3).life() as bench:
        turns = await train(bench, steps=4)
        files, before = set[str]().union(*map(files_of, turns[1:])), sent(bench, 2, 3, 4)
        await bench.until(lambda: bench.on_disk() == files, "three steps are kept")
        bench.feed.steps.clear()
        record = await go_back(bench, 1)
        assert (record["lineage"], record["steps_again"]) == (1, [2, 3, 4])
        nothing = ("steps_reduced", "steps_moved", "steps_gone", "rollouts_dropped")
        assert all(record[name] == [] for name in (*nothing, "files_missing"))
        assert bench.feed.committed_step in {1, 4}, "told, or about to be"
        await bench.until(lambda: bench.feed.taken[4:] == [2, 3], "two are on the way at a time")
        assert bench.feed.told == [{"lineage": 1, "step": 1, "last_step": 4, "earlier": []}]
        bench.feed.commit(2)
        await bench.until(lambda: bench.feed.taken[4:] == [2, 3, 4], "in order")
        assert sent(bench, 2, 3, 4) == before
        assert bench.on_disk() == files, "v(2) of now is not applied"
        bench.feed.commit(4)
        bench.proxy.applied = 1
        await bench.until(lambda: bench.service.book.policy_version == 1, "the engines followed")
        bench.proxy.applied = 4
        await collect(bench, "r5")
        bench.feed.commit(4)
        await bench.until(lambda: 5 in bench.feed.taken, "and the run goes on")
        bench.feed.commit(5)
        bench.proxy.applied = 5
        await bench.until(lambda: bench.on_disk() == _kept(bench, 3, 4, 5), "three are kept")


def _kept(bench: Bench, *steps: int) -> set[str]:
    found: set[str] = set()
    for step in steps:
        grid = bench.feed.steps[step].grid
        found |= {segment.file for row in grid for b in row for segment in b.segments}  # type: ignore[union-attr]
    return found


async def test_without_kept_steps_all_that_is_gone_is_listed_and_its_numbers_come_again(
    tmp_path: Path,
) -> None:
    async with World(tmp_path).life() as bench:
        await train(bench, steps=3)
        record = await go_back(bench, 1)
        assert (record["steps_gone"], record["rollouts_dropped"]) == ([2, 3], ["r2", "r3"])
        assert record["steps_again"] == record["steps_moved"] == []
        bench.proxy.applied = 1
        await bench.until(lambda: bench.service.book.policy_version == 1, "the engines followed")
        await collect(bench, "new")
        await bench.until(lambda: bench.feed.taken == [1, 2, 3, 2], "the trainer misses no number")
        listed = (await bench.http.get("/v1/run/returns")).json()["returns"]
        assert listed == [{key: record[key] for key in record if key != "is_feed_told"}]


async def test_what_lies_behind_a_gap_is_packed_again_in_order(tmp_path: Path) -> None:
    async with World(tmp_path, applied_steps_kept=2).life() as bench:
        turns = await train(bench, steps=4)
        record = await go_back(bench, 1)
        assert (record["steps_gone"], record["steps_moved"]) == ([2], [3, 4])
        assert record["rollouts_dropped"] == ["r2"]
        await bench.until(lambda: bench.feed.taken[4:] == [2, 3], "they are packed again")
        assert (await bench.http.get("/v1/steps/2")).json()["rollout_ids"] == ["r3"]
        assert (await bench.http.get("/v1/steps/3")).json()["rollout_ids"] == ["r4"]
        assert _kept(bench, 2, 3) == files_of(turns[2]) | files_of(turns[3])
        assert bench.on_disk() == _kept(bench, 2, 3)


async def test_a_file_that_is_gone_costs_its_rollout_and_no_other(tmp_path: Path) -> None:
    world = World(tmp_path, applied_steps_kept=5, step_rollouts=2)
    async with world.life() as bench:
        gone, *_ = [await collect(bench, name, advantage=1.0) for name in ("a", "b")]
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        bench.feed.commit(1)
        bench.proxy.applied = 1
        await bench.until(lambda: bench.service.book.policy_version == 1, "it is applied")
        assert bench.root is not None
        for file in files_of(gone):
            bench.root.delete(file)
        record = await go_back(bench, 0)
        assert (record["steps_reduced"], record["rollouts_dropped"]) == ([1], ["a"])
        assert set(record["files_missing"]) == files_of(gone)
        await bench.until(lambda: bench.feed.taken == [1, 1], "it comes again without")
        step = (await bench.http.get("/v1/steps/1")).json()
        assert (step["rollout_ids"], set(step["files"])) == (["b"], bench.on_disk())
        rollout = (await bench.http.get("/v1/rollouts/a")).json()
        assert (rollout["state"], rollout["dropped"]) == ("dropped", {"files_gone": 1})


@pytest.mark.parametrize("lost", [["a"], ["a", "b"]])
async def test_what_a_resume_found_gone_of_a_kept_step_does_not_come_again(
    tmp_path: Path, lost: list[str]
) -> None:
    world = World(tmp_path, applied_steps_kept=5, step_rollouts=2)
    async with world.life() as bench:
        turns = {name: await collect(bench, name, advantage=1.0) for name in ("a", "b")}
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        bench.feed.commit(1)
        await bench.until(
            lambda: bench.service.book.steps[1].acknowledged_s is not None, "the commit is known"
        )
        bench.proxy.applied = 1
        await bench.until(lambda: bench.service.book.policy_version == 1, "it is applied")
        await bench.service.settled()
        assert bench.root is not None
        gone = set[str]().union(*(files_of(turns[name]) for name in lost))
        for file in gone:
            bench.root.delete(file)
    async with world.life() as bench:
        record = await go_back(bench, 0)
        assert record["rollouts_dropped"] == lost
        assert set(record["files_missing"]) == gone
        assert (record["steps_reduced"], record["steps_gone"]) == (
            ([1], []) if lost == ["a"] else ([], [1])
        )
        if lost == ["a"]:
            await bench.until(lambda: bench.feed.taken == [1, 1], "it comes again without")
            assert _kept(bench, 1) == files_of(turns["b"]) == bench.on_disk()


async def test_a_step_that_was_not_committed_comes_again_without_what_is_gone(
    tmp_path: Path,
) -> None:
    async with World(tmp_path, step_rollouts=2).life() as bench:
        turns = {name: await collect(bench, name, advantage=1.0) for name in ("a", "b")}
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        assert bench.root is not None
        for file in files_of(turns["a"]):
            bench.root.delete(file)
        record = await go_back(bench, 0)
        assert (record["steps_reduced"], record["rollouts_dropped"]) == ([1], ["a"])
        await bench.until(lambda: bench.feed.taken == [1, 1], "it comes again")
        assert _kept(bench, 1) == files_of(turns["b"])
        digest = (await bench.http.get("/v1/steps/1")).json()["digest"]
        assert digest == sha256(encode_step(bench.feed.steps[1])).hexdigest()


async def test_the_next_process_goes_on_with_it_and_tells_a_feed_that_was_started_anew(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, applied_steps_kept=3)
    async with world.life() as bench:
        await train(bench, steps=3)
        before = sent(bench, 2, 3)
        world.feed.is_down = True
        await go_back(bench, 1)
    world.feed.steps.clear()
    world.feed.is_down, world.proxy.applied = False, 1
    async with world.life() as bench:
        await bench.until(lambda: world.feed.taken[3:] == [2, 3], "they are built again")
        assert sent(bench, 2, 3) == before
        assert (await bench.run())["lineage"] == 1
        world.feed.forget()
        await bench.until(lambda: world.feed.taken[5:] == [2, 3], "and again")
        assert world.feed.lineage == 1
        assert sent(bench, 2, 3) == before


async def test_commits_of_before_do_not_count(tmp_path: Path) -> None:
    async with World(tmp_path, applied_steps_kept=3).life() as bench:
        await train(bench, steps=3)
        bench.feed.is_down = True
        await go_back(bench, 1)
        bench.feed.lineage = 0  # it was not told, and still says that step 3 is committed
        bench.feed.is_down = False
        await bench.until(lambda: bench.feed.lineage == 1, "it is told first")
        await bench.until(lambda: bench.feed.taken[3:] == [2, 3], "nothing counted as committed")
        states = {
            s["step"]: s["state"] for s in (await bench.http.get("/v1/steps")).json()["steps"]
        }
        assert (states[2], states[3]) != ("acknowledged", "acknowledged")


async def test_engines_must_show_an_older_version_before_leases_are_given(tmp_path: Path) -> None:
    async with World(tmp_path, applied_steps_kept=3, with_proxy=False).life(
        initial_policy_version=0
    ) as bench:
        path = "/v1/policy-version"
        await collect(bench, "r1")
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        bench.feed.commit(1)
        await bench.http.put(path, json={"policy_version": 1})
        await go_back(bench, 0, lineage=1)
        body = {"rollout_id": "b", "group_id": "b", "group_size": 1}
        for _ in range(2):
            refused = assert_problem(
                await bench.http.post("/v1/leases", json=body), 503, "policy_unknown"
            )
            assert "may still serve v1 of before" in refused["detail"]
            await bench.http.put(path, json={"policy_version": 1})  # the same weights, once more
        stale = await bench.http.put(path, json={"policy_version": 1, "lineage": 0})
        assert_problem(stale, 409, "lineage_conflict")
        await bench.http.put(path, json={"policy_version": 0})
        assert (await bench.lease("b"))["policy_version"] == 0
        await go_back(bench, 0, lineage=2)
        assert (await bench.lease("c"))["policy_version"] == 0, "they serve nothing newer"


async def test_a_version_that_is_said_to_be_of_the_lineage_counts_at_once(tmp_path: Path) -> None:
    async with World(tmp_path, applied_steps_kept=3, with_proxy=False).life(
        initial_policy_version=0
    ) as bench:
        await collect(bench, "r1")
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        bench.feed.commit(1)
        await bench.http.put("/v1/policy-version", json={"policy_version": 1})
        await go_back(bench, 0)
        await bench.http.put("/v1/policy-version", json={"policy_version": 1, "lineage": 1})
        assert (await bench.lease("b"))["policy_version"] == 1


async def test_a_repeat_by_lineage_changes_nothing_and_what_cannot_be_is_refused(
    tmp_path: Path,
) -> None:
    async with World(tmp_path, applied_steps_kept=3, steps_ahead_max=4).life() as bench:
        await train(bench, steps=3, committed=2)
        path = "/v1/admin/go-back"
        refused = await bench.http.post(path, json={"step": 3})
        assert assert_problem(refused, 409, "step_not_committed")["committed_step"] == 2
        record = await go_back(bench, 1, lineage=1)
        assert record["steps_again"] == [2, 3]
        assert await go_back(bench, 1, lineage=1) == record
        for wrong in ({"step": 0, "lineage": 1}, {"step": 1, "lineage": 3}):
            assert_problem(await bench.http.post(path, json=wrong), 409, "lineage_conflict")
        await bench.http.post("/v1/admin/drain", json={"deadline_s": 0.001})
        bench.clock.now_s += 1
        await bench.until(lambda: bench.service.book.run.is_terminal, "the run ends")
        assert_problem(await bench.http.post(path, json={"step": 1}), 409, "run_ended")


async def test_a_ledger_in_memory_cannot_go_back(tmp_path: Path) -> None:
    async with World(tmp_path, ledger_url="memory").life() as bench:
        await train(bench, steps=1)
        answer = await bench.http.post("/v1/admin/go-back", json={"step": 0})
        assert_problem(answer, 409, "ledger_not_durable")


@pytest.mark.parametrize("ahead", [1, 2])
async def test_a_step_that_is_being_built_is_decided_again_behind_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    async with World(tmp_path, step_rollouts=ahead).life() as bench:
        for name in ("a", "b")[:ahead]:
            await collect(bench, name, advantage=1.0)
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        bench.feed.commit(1)
        bench.proxy.applied = 1
        await bench.until(lambda: not bench.on_disk(), "it is done")
        monkeypatch.setattr("services.orchestrator.building.validity_problem", _back_first(bench))
        for name in ("c", "d")[:ahead]:
            await collect(bench, name, advantage=1.0)
        await bench.until(lambda: bench.feed.taken == [1, 1], "under the number of the gap")
        assert (await bench.http.get("/v1/steps/1")).json()["rollout_ids"] == ["c", "d"][:ahead]
        assert (await bench.run())["next_step"] == 2


def _back_first(bench: Bench) -> Any:
    """While the second step is built, in its thread, the trainer goes back to the beginning."""
    loop = asyncio.get_running_loop()

    def act(*_: object) -> None:
        if not bench.service.book.returns:
            asyncio.run_coroutine_threadsafe(go_back(bench, 0), loop).result(SETTLE_S)

    return act
