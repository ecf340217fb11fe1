"""The feed hears of a going back before whoever asked for it does, where it can be reached."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.orchestrator import returning
from services.orchestrator.book import Book
from services.orchestrator.history import ReturnRecord
from sideband.feed.ancestry import Line
from tests.services.orchestrator.stubs import StubFeed
from tests.services.orchestrator.test_book import RULES
from tests.services.orchestrator.test_going_back import go_back, train
from tests.services.orchestrator.test_resume import World
from tests.services.orchestrator.test_starting import back_to, trained


class StalledFeed(StubFeed):
    """Takes what it is told of the lineage, and never answers."""

    is_stalled = True

    def __call__(self, request: httpx.Request) -> Any:
        if request.url.path == "/v1/lineage" and self.is_stalled:
            return self._never()
        return super().__call__(request)

    async def _never(self) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")


async def test_the_feed_is_told_before_the_request_is_answered(tmp_path: Path) -> None:
    async with World(tmp_path, applied_steps_kept=3, feed_poll_s=60.0).life() as bench:
        await collect_two(bench)
        answer = await go_back(bench, 0)
        told = list(bench.feed.told)
        assert (answer["is_feed_told"], len(told)) == (True, 1)
        assert "is_feed_told" not in (await bench.http.get("/v1/run/returns")).json()["returns"][0]


async def collect_two(bench: Any) -> None:
    """Two steps that are committed, as the orchestrator knows without asking often."""
    await train(bench, steps=2, committed=0)
    bench.feed.commit(2)
    await bench.service.acknowledge(2)


async def test_a_feed_that_is_down_holds_nothing_up_and_a_repeat_tells_it(tmp_path: Path) -> None:
    async with World(tmp_path, applied_steps_kept=3).life() as bench:
        await train(bench, steps=2)
        bench.feed.is_down = True
        record = await go_back(bench, 1, lineage=1)
        assert (record["lineage"], record["is_feed_told"], bench.feed.told) == (1, False, [])
        bench.feed.is_down = False
        again = await go_back(bench, 1, lineage=1)
        assert again == {**record, "is_feed_told": True}
        assert bench.feed.lineage == 1


async def test_a_feed_that_does_not_answer_holds_the_request_up_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(returning, "TELLING_S_MAX", 0.02)
    world, feed = World(tmp_path, applied_steps_kept=3), StalledFeed()
    world.feed = feed
    async with world.life() as bench:
        await train(bench, steps=2)
        assert not (await go_back(bench, 1))["is_feed_told"]
    async with world.life(
        ledger_lease_s=0.5, wait_for_version=False
    ) as bench:  # nor does it hold a start up
        assert (await bench.run())["lineage"] == 1
        feed.is_stalled = False
    async with world.life(wait_for_version=False):
        assert feed.lineage == 1, "told before it is ready"


async def test_without_a_feed_nobody_need_be_told(tmp_path: Path) -> None:
    async with World(tmp_path, with_feed=False).life() as bench:
        assert (await go_back(bench, 0))["is_feed_told"]


async def test_a_start_that_goes_back_has_told_the_feed_when_it_is_ready(tmp_path: Path) -> None:
    world = World(tmp_path, applied_steps_kept=3)
    async with world.life(start_id="job-1") as bench:
        await trained(bench, steps=2)
    async with world.life(**back_to(1), wait_for_version=False):
        assert [one["step"] for one in world.feed.told] == [1]


async def test_the_feed_is_told_of_every_return_that_still_counts_however_short_the_history(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, applied_steps_kept=9, history_max=1, first_step=1)
    async with world.life() as bench:
        await trained(bench, steps=3)
        await go_back(bench, 2)
        await go_back(bench, 1)
        bench.feed.commit(1)
        await bench.until(lambda: {2, 3} <= bench.feed.held, "they come again")
        bench.feed.commit(3)
        await bench.service.acknowledge(3)
        await go_back(bench, 2)
        assert len(bench.service.book.returns) == 1
        assert bench.feed.told[-1] == {
            "lineage": 3, "step": 2, "last_step": 3, "earlier": [{"lineage": 2, "step": 1}],
        }  # fmt: skip
        told = bench.feed.told[-1]
    world.feed.forget()
    async with world.life(wait_for_version=False):
        assert world.feed.told[-1] == told, "as the ledger has it"


def returned(lineage: int, step: int, line: Line = ()) -> ReturnRecord:
    nothing: Any = dict.fromkeys(
        ("steps_again", "steps_reduced", "steps_moved", "steps_gone", "rollouts_dropped",
         "files_missing"), ()
    )  # fmt: skip
    return ReturnRecord(
        lineage=lineage, step=step, returned_s=0.0, last_step=9, line=line, **nothing
    )


def test_returns_that_an_earlier_version_kept_are_counted_as_far_as_they_are_known() -> None:
    book = Book(RULES)
    book.returns = [returned(1, 3), returned(2, 1), returned(3, 5)]
    assert list(book.line) == [(2, 1), (3, 5)]
    book.returns.append(returned(4, 7, ((2, 1), (3, 5), (4, 7))))
    for _ in range(2):
        assert list(book.line) == [(2, 1), (3, 5), (4, 7)]
        del book.returns[:3]
