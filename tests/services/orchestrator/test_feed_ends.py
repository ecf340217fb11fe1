"""The feed is told that no more will come, whichever process of it serves the ranks then."""

import asyncio
from pathlib import Path

from tests.services.orchestrator.test_delivery_and_end import collect
from tests.services.orchestrator.test_resume import World


async def test_a_feed_that_starts_anew_after_the_end_is_told_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.life() as bench:
        await collect(bench, "a")
        await bench.http.post("/v1/admin/drain")
        await bench.until(lambda: bench.feed.has_ended, "the feed is told")
        bench.feed.forget()
        await bench.until(lambda: bench.feed.has_ended, "so is the next one")
        assert bench.feed.taken == [1, 1], "the step that was lost comes first"
        bench.feed.commit(1)
        bench.proxy.applied = 1
        await bench.until(lambda: bench.service.book.run.phase == "ended", "the run ends")
        bench.feed.forget()
        await bench.until(lambda: bench.feed.has_ended, "a rank may not have heard it")
        assert bench.feed.taken == [1, 1]


async def test_a_feed_that_starts_anew_just_before_the_end_takes_what_it_lost(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with world.life() as bench:
        await collect(bench, "a")
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        bench.feed.restarts_before_end = True
        await bench.http.post("/v1/admin/drain")
        await bench.until(lambda: bench.feed.has_ended, "the feed is told")
        assert bench.feed.taken == [1, 1]
        assert bench.service.book.run.phase == "draining", "an ended feed refuses every step"


async def test_the_end_is_not_told_to_a_feed_that_does_not_know_the_lineage(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, applied_steps_kept=2)
    async with world.life() as bench:
        await collect(bench, "a")
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        bench.feed.commit(1)
        await bench.until(
            lambda: bench.service.book.steps[1].state == "acknowledged", "the commit is known"
        )
        answer = await bench.http.post("/v1/admin/go-back", json={"step": 1, "lineage": 1})
        assert answer.status_code == 200, answer.text
        await bench.until(lambda: bench.feed.lineage == 1, "the feed is told")
        bench.feed.forget()
        bench.service.feed_lineage = 1
        await bench.http.post("/v1/admin/drain")
        await bench.until(lambda: bench.feed.has_ended, "the feed is told the end")
        assert bench.feed.lineage == 1


async def test_a_run_that_another_feed_stops_does_not_end_that_feed(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.life() as bench:
        bench.feed.run_id = "run-2"
        await collect(bench, "a")
        await bench.until(lambda: bench.service.book.run.is_terminal, "the run stops")
        await asyncio.sleep(0.05)
        assert not bench.feed.has_ended
