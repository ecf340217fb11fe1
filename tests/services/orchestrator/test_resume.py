"""A restart goes on where the ledger stands; what is gone is dropped, and said."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sideband.feed.codec import encode_step
from tests.services.orchestrator.stubs import StubFeed, StubProxy
from tests.services.orchestrator.support import (
    Bench,
    ManualClock,
    assert_problem,
    files_of,
    inline_turn,
    orchestrator,
    plain_turn,
)


class World:
    """What outlives the orchestrator."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.tmp_path, self.settings = tmp_path, settings
        self.feed, self.proxy, self.clock = StubFeed(), StubProxy(), ManualClock()

    def life(self, **settings: Any) -> Any:
        """One process of the orchestrator after the other."""
        return orchestrator(
            self.tmp_path,
            feed=self.feed,
            proxy=self.proxy,
            clock=self.clock,
            **{**self.settings, **settings},
        )


async def collect(bench: Bench, name: str, **more: Any) -> dict[str, Any]:
    """Lease, write, deliver."""
    await bench.lease(name)
    turn = await bench.write(f"{name}.t0", [1, 2], [3])
    answer = await bench.deliver(name, turn, **more)
    assert answer.status_code == 202, answer.text
    return turn


async def test_leases_groups_and_receipts_outlive_the_process(tmp_path: Path) -> None:
    world = World(tmp_path, step_rollouts=9)
    async with world.life() as bench:
        first = await bench.lease("a", "g", size=2, session_id="s", env_name="math")
        second = await bench.lease("b", "g", size=2)
        turn = await bench.write("a.t0", [1, 2], [3])
        receipt = (await bench.deliver("a", turn, reward=1.0)).json()
        assert receipt["state"] == "waiting"
        bad = await bench.lease("bad")
        refused = await bench.deliver("bad", plain_turn("bad.t0", [], [3]))
        assert_problem(refused, 422, "malformed_turn")
        before = await bench.run()
    async with world.life() as bench:
        assert await bench.run() == before
        again = await bench.lease("b", "g", size=2)
        assert (again["lease_id"], again["index"]) == (second["lease_id"], second["index"])
        assert (await bench.deliver("a", turn, reward=1.0)).json() == receipt
        conflict = await bench.deliver("a", turn, reward=2.0)
        assert_problem(conflict, 409, "rollout_conflict")
        view = (await bench.http.get(f"/v1/leases/{first['lease_id']}")).json()
        assert view["state"] == "delivered"
        refused = await bench.deliver("bad", plain_turn("bad.t0", [], [3]))
        assert_problem(refused, 422, "malformed_turn")
        assert (await bench.http.get(f"/v1/leases/{bad['lease_id']}")).json()["state"] != "open"
        await bench.deliver("b", await bench.write("b.t0", [1, 2], [4]), reward=0.0)
        rollout = (await bench.http.get("/v1/rollouts/a")).json()
        assert rollout["state"] == "ready", "its group was completed by the later process"
        new = await bench.lease("c")
        assert new["index"] == bad["index"] + 1, "dispatch goes on counting"


@pytest.mark.parametrize("form", ["handle", "inline"])
async def test_a_step_that_the_feed_lost_is_built_again_bit_by_bit(
    tmp_path: Path, form: str
) -> None:
    world = World(tmp_path, step_rollouts=3)
    async with world.life() as bench:
        for name, reward in (("a", 1.0), ("b", 0.0)):
            await bench.lease(name, "g", size=2)
            turn = (
                await bench.write(f"{name}.t0", [1, 2], [3, 4])
                if form == "handle"
                else inline_turn(f"{name}.t0", [1, 2], [3, 4])
            )
            await bench.deliver(name, turn, reward=reward)
        await collect(bench, "c", advantage=0.25)
        await bench.until(lambda: bench.feed.taken == [1], "the step is shipped")
        sent = encode_step(bench.feed.steps[1])
        files = bench.on_disk()
    world.feed.forget()
    world.feed.steps.clear()
    async with world.life() as bench:
        await bench.until(lambda: bench.feed.taken == [1, 1], "it is sent again")
        assert encode_step(bench.feed.steps[1]) == sent
        assert bench.on_disk() == files
        bench.feed.commit(1)
        bench.proxy.applied = 1
        await bench.until(lambda: not bench.on_disk(), "its files go when it is done")
        assert (await bench.http.get("/v1/rollouts/a")).json()["state"] == "trained"


async def test_a_step_that_was_decided_and_not_built_is_built_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, step_rollouts=2)
    with monkeypatch.context() as patch:
        patch.setattr("services.orchestrator.building.build", _never)
        async with world.life() as bench:
            await collect(bench, "a")
            await collect(bench, "b")
            await bench.until(lambda: bench.service.book.draft is not None, "it is decided")
            await bench.service.settled()
    async with world.life() as bench:
        await bench.until(lambda: bench.feed.taken == [1], "it is built and shipped")
        step = (await bench.http.get("/v1/steps/1")).json()
        assert step["rollout_ids"] == ["a", "b"]


def _never(*_: object) -> None:
    raise RuntimeError("the process dies here")


async def test_commits_that_came_while_nobody_listened_count(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.life() as bench:
        await collect(bench, "a")
        await bench.until(lambda: bench.feed.taken == [1], "the step is shipped")
        await bench.service.settled()
    world.feed.commit(1)
    world.proxy.applied = 1
    async with world.life() as bench:
        await bench.until(lambda: not bench.on_disk(), "its files go")
        assert bench.feed.taken == [1], "and it is not sent again"


async def test_work_whose_files_are_gone_is_dropped_and_listed(tmp_path: Path) -> None:
    world = World(tmp_path, step_rollouts=9)
    async with world.life() as bench:
        gone = await collect(bench, "gone")
        kept = await collect(bench, "kept")
        running = await bench.lease("running")
        early = await bench.write("running.t0", [1], [2])
        url = f"/v1/leases/{running['lease_id']}/renew"
        assert (await bench.http.post(url, json={"files": list(files_of(early))})).is_success
        assert bench.root is not None
        for file in files_of(gone) | files_of(early):
            bench.root.delete(file)
    async with world.life() as bench:
        view = (await bench.http.get("/v1/run/resumption")).json()
        assert view["rollouts_dropped"] == ["gone"]
        assert set(view["files_missing"]) == files_of(gone) | files_of(early)
        rollout = (await bench.http.get("/v1/rollouts/gone")).json()
        assert (rollout["state"], rollout["dropped"]) == ("dropped", {"files_gone": 1})
        assert (await bench.http.get("/v1/rollouts/kept")).json()["files"] == list(files_of(kept))
        late = await bench.deliver("running", early)
        assert late.json()["dropped"] == {"files_gone": 1}
        assert bench.on_disk() == files_of(kept)


async def test_a_step_that_was_not_shipped_goes_on_without_what_is_gone(tmp_path: Path) -> None:
    world = World(tmp_path, step_rollouts=2)
    world.feed.is_down = True
    async with world.life() as bench:
        gone = await collect(bench, "a")
        kept = await collect(bench, "b")
        await bench.until(lambda: 1 in bench.service.book.steps, "the step is built")
        await bench.service.settled()
        assert bench.root is not None
        for file in files_of(gone):
            bench.root.delete(file)
    world.feed.is_down = False
    async with world.life() as bench:
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        view = (await bench.http.get("/v1/run/resumption")).json()
        assert (view["steps_reduced"], view["rollouts_dropped"]) == ([1], ["a"])
        step = (await bench.http.get("/v1/steps/1")).json()
        assert (step["rollout_ids"], step["files"]) == (["b"], list(files_of(kept)))
        segments = {s.file for row in bench.feed.steps[1].grid for b in row for s in b.segments}
        assert segments == files_of(kept)


async def test_a_step_that_was_shipped_keeps_its_content_and_is_named(tmp_path: Path) -> None:
    world = World(tmp_path, step_rollouts=2)
    async with world.life() as bench:
        gone = await collect(bench, "a")
        await collect(bench, "b")
        await bench.until(lambda: bench.feed.taken == [1], "the step is shipped")
        await bench.service.settled()
        assert bench.root is not None
        for file in files_of(gone):
            bench.root.delete(file)
    async with world.life() as bench:
        view = (await bench.http.get("/v1/run/resumption")).json()
        assert (view["steps_broken"], view["rollouts_dropped"]) == ([1], [])
        step = (await bench.http.get("/v1/steps/1")).json()
        assert (step["state"], step["rollout_ids"]) == ("shipped", ["a", "b"])


async def test_a_fresh_run_forgets_the_run_and_wipes_the_root(tmp_path: Path) -> None:
    world = World(tmp_path, step_rollouts=9)
    async with world.life() as bench:
        await collect(bench, "a")
    async with world.life(start="fresh", start_id="another") as bench:
        assert not bench.on_disk()
        assert (await bench.http.get("/v1/rollouts/a")).status_code == 404
        assert (await bench.lease("a"))["index"] == 0
    async with world.life() as bench:
        assert [lease["rollout_id"] for lease in await _leases(bench)] == ["a"]


async def _leases(bench: Bench) -> list[dict[str, Any]]:
    leases: list[dict[str, Any]] = (await bench.http.get("/v1/leases")).json()["leases"]
    return leases


async def test_deadlines_wait_for_the_time_that_nobody_listened(tmp_path: Path) -> None:
    world = World(tmp_path, lease_timeout_s=100.0, policy_timeout_s=100.0)
    async with world.life() as bench:
        lease = await bench.lease("slow")
        await collect(bench, "a")
        await bench.until(lambda: bench.feed.taken == [1], "the step is shipped")
        bench.feed.commit(1)
        await bench.until(
            lambda: bench.service.book.steps[1].state == "acknowledged", "it is committed"
        )
        await bench.service.settled()
    world.clock.now_s += 10_000
    async with world.life() as bench:
        await bench.service.tick()
        (again,) = await _leases(bench)
        assert again["lease_id"] == lease["lease_id"]
        assert (await bench.run())["phase"] == "running"
        world.clock.now_s += 101
        await bench.until(lambda: not bench.service.book.open_leases, "then it expires")
        await bench.until(lambda: bench.service.book.run.is_terminal, "and the policy is late")


async def test_the_version_is_asked_for_again_and_a_push_is_remembered(tmp_path: Path) -> None:
    world = World(tmp_path, with_proxy=False)
    async with world.life(initial_policy_version=0) as bench:
        await bench.http.put("/v1/policy-version", json={"policy_version": 3})
    async with world.life(initial_policy_version=0) as bench:
        assert (await bench.lease("a"))["policy_version"] == 3
    world.proxy.is_down = True
    async with orchestrator(tmp_path, proxy=world.proxy, wait_for_version=False) as bench:
        body = {"rollout_id": "b", "group_id": "b", "group_size": 1}
        assert_problem(await bench.http.post("/v1/leases", json=body), 503, "policy_unknown")
        world.proxy.applied, world.proxy.is_down = 2, False  # an engine went back
        await bench.until(lambda: bench.service.book.policy_version == 2, "the proxy says")


async def test_deletions_that_failed_are_done_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, step_rollouts=9)
    async with world.life() as bench:
        turn = await collect(bench, "a")
        assert bench.service.files is not None
        hold = asyncio.Event()
        monkeypatch.setattr(bench.service.files.deleter, "add", lambda files: hold.set())
        await bench.http.delete("/v1/rollouts/a")
        assert hold.is_set()
        assert bench.on_disk() == files_of(turn)
    async with world.life() as bench:
        await bench.until(lambda: not bench.on_disk(), "the deletion was remembered")


async def test_a_phase_is_remembered(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.life() as bench:
        await bench.http.post("/v1/admin/pause")
    async with world.life() as bench:
        assert (await bench.run())["phase"] == "paused"
        await bench.http.post("/v1/admin/drain")
        await bench.until(lambda: bench.service.book.run.is_terminal, "it ends")
        await bench.service.settled()
    async with world.life() as bench:
        body = {"rollout_id": "b", "group_id": "b", "group_size": 1}
        assert_problem(await bench.http.post("/v1/leases", json=body), 409, "run_ended")


async def test_settings_that_give_another_step_stop_a_run_whose_step_is_shipped(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with world.life() as bench:
        await collect(bench, "a")
        await bench.until(lambda: bench.feed.taken == [1], "the step is shipped")
        await bench.service.settled()
    async with world.life(pad_multiple=16) as bench:
        await bench.until(lambda: bench.service.book.run.is_terminal, "the run stops")
        assert "settings or version have changed" in (await bench.run())["reason"]
