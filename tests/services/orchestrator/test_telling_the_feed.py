"""The feed is told of every return of the trainer that still counts."""

from pathlib import Path
from typing import Any

from services.orchestrator.book import Book
from services.orchestrator.history import ReturnRecord
from sideband.feed.ancestry import Line
from tests.services.orchestrator.test_book import RULES
from tests.services.orchestrator.test_going_back import go_back
from tests.services.orchestrator.test_resume import World
from tests.services.orchestrator.test_starting import trained


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
        await bench.until(lambda: bench.feed.lineage == 3, "it is told")
        assert bench.feed.told[-1] == {
            "lineage": 3, "step": 2, "last_step": 3, "earlier": [{"lineage": 2, "step": 1}],
        }  # fmt: skip
        told = bench.feed.told[-1]
    world.feed.forget()
    async with world.life(wait_for_version=False) as bench:
        await bench.until(lambda: world.feed.lineage == 3, "it is told again")
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
