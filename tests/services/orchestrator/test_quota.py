"""A payload root that fills up refuses new work instead of failing an engine's write."""

from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.quota import Quota, Usage
from tests.services.orchestrator.support import Bench, assert_problem, orchestrator, plain_turn

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free_bytes", "used_bytes", "is_full"),
    [(GIB, 0, False), (GIB - 1, 0, True), (GIB, 100, False), (GIB, 101, True), (GIB, None, False)],
)
def test_either_mark_makes_a_root_full(
    free_bytes: int, used_bytes: int | None, is_full: bool
) -> None:
    quota = Quota(free_bytes_min=GIB, used_bytes_max=100)
    assert quota.observe(Usage(free_bytes=free_bytes, used_bytes=used_bytes)) is is_full
    assert quota.is_full is is_full


def test_a_full_root_has_room_again_only_some_way_below_the_mark() -> None:
    quota = Quota(free_bytes_min=1000, used_bytes_max=None)
    turns = [quota.observe(Usage(free_bytes=free)) for free in (999, 1000, 1049, 1050, 1000, 999)]
    assert turns == [True, False, False, True, False, True]


async def fill(bench: Bench, *, free_bytes: int) -> None:
    """The next measurement, by hand."""
    await bench.until(lambda: bench.service.room.quota.usage is not None, "it was measured")
    bench.service.room.observe(Usage(free_bytes=free_bytes), bench.service.book)


SLOW: dict[str, Any] = {"storage_poll_s": 600.0, "payload_free_bytes_min": 1000}


async def test_a_full_root_refuses_leases_and_says_what_it_waits_for(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, **SLOW) as bench:
        await bench.lease("r0")
        await bench.deliver("r0", await bench.write("r0.t0", [1, 2], [3]))
        await bench.until(lambda: bench.feed.taken == [1], "the step is shipped")
        bench.feed.ranks = [(0, 1), (3, 0)]
        await bench.until(lambda: bench.service.room.late_ranks == [3], "a rank is behind")
        await fill(bench, free_bytes=10)
        body = {"rollout_id": "r1", "group_id": "r1", "group_size": 1}
        answer = await bench.http.post("/v1/leases", json=body)
        problem = assert_problem(answer, 503, "storage_full")
        assert answer.headers["retry-after"]
        assert problem["late_ranks"] == [3]
        assert "not every rank committed step 1 (rank 3)" in problem["detail"]
        assert await bench.metric("orchestrator_storage_full") == 1
        assert await bench.metric("orchestrator_storage_refusals_total") == 1
        await fill(bench, free_bytes=2000)
        assert (await bench.http.post("/v1/leases", json=body)).status_code == 200
        assert await bench.metric("orchestrator_storage_full") == 0


async def test_a_full_root_takes_a_delivery_only_when_nothing_else_will_free_space(
    tmp_path: Path,
) -> None:
    async with orchestrator(tmp_path, **SLOW) as bench:
        for name in ("r0", "r1", "r2"):
            await bench.lease(name)
        await fill(bench, free_bytes=10)
        turns = [await bench.write(f"r{n}.t0", [1, 2], [3]) for n in range(3)]
        assert (await bench.deliver("r0", turns[0])).status_code == 202, "it fills a step"
        await bench.until(lambda: bench.feed.taken == [1], "the step is shipped")
        assert_problem(await bench.deliver("r1", turns[1]), 503, "storage_full")
        repeat = await bench.deliver("r0", turns[0])
        assert repeat.status_code == 202, "a repeat adds nothing"
        bench.feed.commit(1)
        bench.proxy.applied = 1
        await bench.until(lambda: not bench.service.book.open_steps, "the step is done")
        assert (await bench.deliver("r1", turns[1])).status_code == 202


async def test_the_bytes_of_the_run_are_counted_where_they_are_bounded(tmp_path: Path) -> None:
    bounds: dict[str, Any] = {"payload_bytes_max": 100, "storage_poll_s": 0.01, "step_rollouts": 9}
    async with orchestrator(tmp_path, **bounds, payload_free_bytes_min=0) as bench:
        await bench.lease("r0")
        await bench.deliver("r0", await bench.write("r0.t0", [1, 2], [3]))
        await bench.until_metric("orchestrator_storage_full", 1)
        assert await bench.metric("orchestrator_storage_used_bytes") > 100
        await bench.http.delete("/v1/rollouts/r0")
        await bench.until_metric("orchestrator_storage_full", 0)
        assert await bench.metric("orchestrator_storage_used_bytes") == 0


async def test_without_a_root_nothing_is_measured(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False, **SLOW) as bench:
        await bench.lease("r0")
        answer = await bench.deliver("r0", plain_turn("r0.t0", [1, 2], [3]))
        assert answer.status_code == 202
        assert bench.service.room.quota.usage is None
