"""A run that a fault stopped goes on when the fault is gone, and not before."""

from pathlib import Path
from typing import Any

import pytest

from tests.services.orchestrator.stubs import refusal
from tests.services.orchestrator.support import Bench, assert_problem, files_of, inline_turn
from tests.services.orchestrator.test_resume import World, collect

PATH = "/v1/admin/reopen"
LEASE = {"rollout_id": "b", "group_id": "b", "group_size": 1}


async def stopped(bench: Bench) -> str:
    await bench.until(lambda: bench.service.book.run.is_terminal, "the run stops")
    run = await bench.run()
    assert run["phase"] == "stopped"
    reason: str = run["reason"]
    return reason


async def refused(bench: Bench, cause: str) -> None:
    reason = await stopped(bench)
    problem = assert_problem(await bench.http.post(PATH), 409, "cause_persists")
    assert problem["reason"] == reason
    assert cause in problem["cause"]
    assert (await bench.run())["phase"] == "stopped"


async def reopened(bench: Bench, phase: str = "running") -> dict[str, Any]:
    reason = await stopped(bench)
    run: dict[str, Any] = {}
    for _ in range(2):
        answer = await bench.http.post(PATH)
        assert answer.status_code == 200, answer.text
        run = answer.json()
        assert (run["phase"], run["reason"]) == (phase, f"reopened after: {reason}")
    return run


async def test_a_step_that_the_feed_refused_is_taken_when_it_does_not_any_more(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.feed.refusals += [refusal(409, "other_grid")] * 2
    async with world.life() as bench:
        await collect(bench, "a")
        await refused(bench, "refused step 1 (409 other_grid)")
        await bench.until(lambda: bench.feed.has_ended, "the ranks are told that nothing comes")
        await reopened(bench)
        assert not bench.feed.has_ended, "or it would refuse every step"
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        await collect(bench, "b")
        await bench.until(lambda: bench.feed.taken == [1, 2], "and the run goes on")


async def test_a_feed_of_another_run_or_none_keeps_it_stopped(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.life() as bench:
        await collect(bench, "a")
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        bench.feed.run_id = "run-2"
        await refused(bench, "the feed serves run run-2")
        bench.feed.is_down = True
        await refused(bench, "the feed cannot be asked")
        bench.feed.is_down, bench.feed.run_id = False, "run-1"
        await reopened(bench)


async def test_a_policy_that_was_late_must_be_applied_first(tmp_path: Path) -> None:
    world = World(tmp_path, policy_timeout_s=600)
    async with world.life() as bench:
        await collect(bench, "a")
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        bench.feed.commit(1)
        await bench.until(
            lambda: bench.service.book.steps[1].state == "acknowledged", "it is committed"
        )
        bench.clock.now_s += 601
        await refused(bench, "v1 was not applied within 600 s")
        bench.proxy.applied = 1
        await bench.until(lambda: bench.service.book.policy_version == 1, "it is applied")
        await reopened(bench)
        assert (await bench.lease("b"))["policy_version"] == 1


async def test_what_was_collected_before_it_stopped_is_trained_once_it_goes_on(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, policy_timeout_s=600, step_rollouts=2)
    async with world.life() as bench:
        await collect(bench, "a")
        await collect(bench, "b")
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        held = await collect(bench, "c")
        bench.feed.commit(1)
        await bench.until(
            lambda: bench.service.book.steps[1].state == "acknowledged", "it is committed"
        )
        bench.clock.now_s += 601
        await stopped(bench)
    world.proxy.applied = 1
    async with world.life() as bench:
        await bench.until(lambda: bench.service.book.policy_version == 1, "it is applied")
        assert list(bench.service.book.held) == ["c"]
        assert files_of(held) <= bench.on_disk()
        await reopened(bench)
        await bench.lease("d")
        last = await bench.write("d.t0", [1, 2], [3], policy_version=1)
        assert (await bench.deliver("d", last)).status_code == 202
        await bench.until(lambda: bench.feed.taken == [1, 2], "with what was held")


async def test_too_few_rows_stop_it_until_the_setting_allows_them(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.life(mask_valid_fraction_min=0.9) as bench:
        await bench.lease("a")
        turn = inline_turn("a.t0", [1, 2], [3, 4, 5], top_p=0.9, empty_masks=(1,))
        assert (await bench.deliver("a", turn)).status_code == 202
        await refused(bench, "of its sampling masks")
    async with world.life(mask_valid_fraction_min=0.5) as bench:
        await reopened(bench)
        await bench.until(lambda: bench.feed.taken == [1], "it is built and shipped")


async def test_settings_that_change_a_shipped_step_must_be_taken_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.life() as bench:
        await collect(bench, "a")
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        await bench.service.settled()
    async with world.life(pad_multiple=16) as bench:
        await refused(bench, "settings or version have changed")
    async with world.life() as bench:
        await reopened(bench)


async def test_a_drain_goes_on_as_a_drain_and_an_ended_run_stays_ended(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.feed.refusals.append(refusal(409, "other_grid"))
    async with world.life() as bench:
        await bench.lease("running")
        await bench.http.post("/v1/admin/drain")
        turn = await bench.write("running.t0", [1, 2], [3])
        await bench.deliver("running", turn)
        await reopened(bench, "draining")
        bench.feed.commit(1)
        bench.proxy.applied = 1
        await bench.until(lambda: bench.service.book.run.phase == "ended", "it is drained")
        assert (await bench.run())["reason"] == "drained"
        assert_problem(await bench.http.post(PATH), 409, "run_ended")


@pytest.mark.parametrize("paused_after_the_stop", [False, True])
async def test_a_paused_run_is_reopened_paused_also_by_the_next_process(
    tmp_path: Path, paused_after_the_stop: bool
) -> None:
    world = World(tmp_path)
    world.feed.refusals.append(refusal(409, "other_grid"))
    async with world.life() as bench:
        await bench.lease("a")
        if not paused_after_the_stop:
            await bench.http.post("/v1/admin/pause")
        await bench.deliver("a", await bench.write("a.t0", [1, 2], [3]))
        await stopped(bench)
        if paused_after_the_stop:
            assert (await bench.http.post("/v1/admin/pause")).json()["phase"] == "stopped"
        await bench.service.settled()
    async with world.life() as bench:
        await reopened(bench, "paused")
        refused = await bench.http.post("/v1/leases", json=LEASE)
        assert_problem(refused, 409, "run_paused")
        assert (await bench.http.post("/v1/admin/resume")).json()["phase"] == "running"


async def test_a_run_that_is_not_stopped_stays_as_it_is(tmp_path: Path) -> None:
    async with World(tmp_path).life() as bench:
        await bench.http.post("/v1/admin/pause")
        assert (await bench.http.post(PATH)).json()["phase"] == "paused"


async def test_without_a_ledger_a_crashed_task_is_not_reopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("services.orchestrator.building.build", broken)
    async with World(tmp_path, ledger_url="memory").life() as bench:
        await collect(bench, "a")
        await refused(bench, "a background task crashed")
