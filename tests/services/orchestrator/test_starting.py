"""A start that names the trainer's checkpoint goes back to it, once, however often it comes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.orchestrator.beginning import StartRefused
from services.orchestrator.config import OrchestratorSettings
from services.orchestrator.going_back import committed_step
from services.orchestrator.history import ReturnRecord
from services.orchestrator.ledger import LeadershipLost, LedgerFailed
from services.orchestrator.records import Change
from services.orchestrator.storage.rows import read_return, return_row
from tests.services.orchestrator.plain_ledger import PlainLedger
from tests.services.orchestrator.support import Bench, files_of
from tests.services.orchestrator.test_going_back import collect, go_back, sent, train
from tests.services.orchestrator.test_resume import World


class FailingReturns(PlainLedger):
    """Fails when the trainer goes back, before or after it has kept that."""

    failures = 0
    is_kept = False

    async def commit(self, changes: Sequence[Change]) -> None:
        is_failing = self.failures and any(change.returns for change in changes)
        if not is_failing or self.is_kept:
            self.apply(changes)
        if is_failing:
            self.failures -= 1
            raise LedgerFailed("as told")


class LedByAnother(PlainLedger):
    """Another orchestrator leads for so many more looks at it."""

    looks = 0

    async def commit(self, changes: Sequence[Change]) -> None:
        if self.looks:
            self.looks -= 1
            raise LeadershipLost("http://other:8200")
        self.apply(changes)


def back_to(step: int, start_id: str = "job-2") -> dict[str, Any]:
    """The settings of such a start."""
    return {"resume_from_step": step, "start_id": start_id}


async def returns(bench: Bench) -> list[tuple[int, int, str | None]]:
    """Each time that the trainer went back: lineage, step, start."""
    listed = (await bench.http.get("/v1/run/returns")).json()["returns"]
    return [(one["lineage"], one["step"], one["start_id"]) for one in listed]


async def trained(bench: Bench, *, steps: int) -> list[dict[str, Any]]:
    """So many steps, and the orchestrator knows that all of them are committed."""
    turns = await train(bench, steps=steps)
    await bench.until(lambda: committed_step(bench.service.book) == steps, "they are committed")
    await bench.service.settled()
    return turns


async def test_a_start_goes_back_once_and_its_steps_come_again_bitwise(tmp_path: Path) -> None:
    world = World(tmp_path, applied_steps_kept=3)
    async with world.life(start_id="job-1") as bench:
        turns = await trained(bench, steps=4)
        before = sent(bench, 2, 3, 4)
    world.feed.forget()
    world.proxy.applied = 1
    async with world.life(**back_to(1)) as bench:
        assert await returns(bench) == [(1, 1, "job-2")]
        await bench.until(lambda: bench.feed.taken[4:] == [2, 3], "two are on the way at a time")
        assert bench.feed.told == [{"lineage": 1, "step": 1, "last_step": 4, "earlier": []}]
        bench.feed.commit(3)
        await bench.until(lambda: bench.feed.taken[4:] == [2, 3, 4], "in order")
        assert sent(bench, 2, 3, 4) == before
        assert bench.on_disk() == set[str]().union(*map(files_of, turns[1:]))
    for _ in range(2):  # a supervisor starts it again
        async with world.life(**back_to(1)) as bench:
            assert await returns(bench) == [(1, 1, "job-2")]
            states = {
                s["step"]: s["state"] for s in (await bench.http.get("/v1/steps")).json()["steps"]
            }
            assert states[3] == "acknowledged", "what was trained since stays trained"
    async with world.life(**back_to(2, "job-3")) as bench:
        assert await returns(bench) == [(1, 1, "job-2"), (2, 2, "job-3")]
    async with world.life(start_id="job-4") as bench:
        assert (await bench.run())["lineage"] == 2, "a start that names no step goes on"


@pytest.mark.parametrize("is_kept", [False, True])
async def test_a_start_that_dies_as_it_goes_back_does_so_in_the_next_life_or_has_done_it(
    tmp_path: Path, is_kept: bool
) -> None:
    ledger = FailingReturns()
    world = World(tmp_path, applied_steps_kept=3, ledger=ledger)
    async with world.life() as bench:
        await trained(bench, steps=3)
        before = sent(bench, 2, 3)
    world.proxy.applied = 1
    ledger.failures, ledger.is_kept = 1, is_kept
    with pytest.raises(LedgerFailed):
        async with world.life(**back_to(1)):
            pass
    assert not ledger.failures
    records = ledger.records()
    assert records is not None
    assert len(records.returns) == is_kept
    async with world.life(**back_to(1)) as bench:
        assert await returns(bench) == [(1, 1, "job-2")]
        await bench.until(lambda: bench.feed.taken[3:] == [2, 3], "they come again")
        assert sent(bench, 2, 3) == before


async def test_a_start_that_must_stand_by_first_goes_back_when_it_leads(tmp_path: Path) -> None:
    ledger = LedByAnother()
    world = World(tmp_path, applied_steps_kept=3, ledger=ledger, ledger_lease_s=0.5)
    async with world.life(start_id="job-1") as bench:
        await trained(bench, steps=3)
    ledger.looks, world.proxy.applied = 3, 1
    async with world.life(**back_to(1), wait_for_version=False) as bench:
        await bench.until(lambda: bench.app.state.terms.problem() is None, "it leads")
        assert not ledger.looks
        assert await returns(bench) == [(1, 1, "job-2")]
    ledger.looks = 3
    async with world.life(**back_to(1), wait_for_version=False) as bench:
        await bench.until(lambda: bench.app.state.terms.problem() is None, "it leads again")
        assert await returns(bench) == [(1, 1, "job-2")]


async def test_a_start_that_is_older_than_another_does_not_go_back(tmp_path: Path) -> None:
    world = World(tmp_path, applied_steps_kept=3)
    async with world.life(start_id="job-1") as bench:  # it never went back
        await trained(bench, steps=3)
    world.proxy.applied = 2
    async with world.life(**back_to(2, "job-2")) as bench:
        assert await returns(bench) == [(1, 2, "job-2")]
    async with world.life(**back_to(1, "job-3"), wait_for_version=False) as bench:
        assert await returns(bench) == [(1, 2, "job-2"), (2, 1, "job-3")]
    done = [(1, 2, "job-2"), (2, 1, "job-3")]
    with pytest.raises(StartRefused, match=r"Start job-3 has come since.*START_ID"):
        async with world.life(**back_to(0, "job-1")):
            pass
    for settings in (
        {"start_id": "job-1"},  # names no step: goes on
        back_to(2, "job-2"),  # has gone back
        back_to(1, "job-3"),
        {"start_id": "job-1", "start": "resume"},
    ):
        async with world.life(**settings, wait_for_version=False) as bench:
            assert await returns(bench) == done
    async with world.life(**back_to(0, "job-4"), wait_for_version=False) as bench:
        assert await returns(bench) == [*done, (3, 0, "job-4")]


async def test_a_start_that_went_back_so_long_ago_that_it_is_forgotten_does_not_do_it_again(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, applied_steps_kept=3, history_max=1)
    async with world.life(start_id="job-1") as bench:
        await trained(bench, steps=2)
    for name in ("job-2", "job-3", "job-4"):
        async with world.life(**back_to(1, name), wait_for_version=False) as bench:
            last = await returns(bench)
    assert [start for _, _, start in last] == ["job-3", "job-4"]
    with pytest.raises(StartRefused, match="Start job-4 has come since"):
        async with world.life(**back_to(1, "job-2")):
            pass


async def test_what_is_gone_is_dropped_and_listed(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.life() as bench:
        await trained(bench, steps=3)
    world.proxy.applied = 1
    async with world.life(**back_to(1)) as bench:
        (record,) = (await bench.http.get("/v1/run/returns")).json()["returns"]
        assert (record["steps_gone"], record["rollouts_dropped"]) == ([2, 3], ["r2", "r3"])
        await collect(bench, "new")
        await bench.until(lambda: bench.feed.taken == [1, 2, 3, 2], "the trainer misses no number")


async def test_a_start_that_cannot_go_back_ends_by_name_and_changes_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, applied_steps_kept=3)
    async with world.life(**back_to(0, "job-1")) as bench:
        await trained(bench, steps=2)
    refused = {
        "Step 3 is none that every rank has committed: the last is 2": back_to(3),
        "It went back to step 0 before: another start needs another id": back_to(1, "job-1"),
    }
    for reason, settings in refused.items():
        with pytest.raises(StartRefused, match=rf"{reason}.*RESUME_FROM_STEP.*START_ID"):
            async with world.life(**settings):
                pass
    async with world.life() as bench:
        assert await returns(bench) == [(1, 0, "job-1")]
        await bench.http.post("/v1/admin/drain")
        await bench.until(lambda: bench.service.book.run.is_terminal, "it ends")
        await bench.service.settled()
    with pytest.raises(StartRefused, match="The run has ended"):
        async with world.life(**back_to(1)):
            pass
    async with world.life(**back_to(0, "job-1")) as bench:
        assert (await bench.run())["phase"] == "ended", "what it did is done"


async def test_a_checkpoint_that_the_ledger_does_not_know_of_goes_on_without_going_back(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, applied_steps_kept=3)
    async with world.life(start_id="job-1") as bench:
        await train(bench, steps=3, committed=1)
        await bench.until(lambda: committed_step(bench.service.book) == 1, "it knows of the first")
    world.feed.forget()  # the trainer committed the second step, saved it, and all of them died
    with pytest.raises(StartRefused, match=r"the last is 1, .* goes on without going back\. It is"):
        async with world.life(**back_to(2)):
            pass
    with pytest.raises(StartRefused, match=r"the last is 1, the first of the run 1\. It is"):
        async with world.life(**back_to(4)):
            pass
    async with world.life(start_id="job-2") as bench:
        world.feed.commit(2)  # as its ranks say when they join
        await bench.until(lambda: committed_step(bench.service.book) == 2, "it hears of it")
        await bench.until(lambda: world.feed.taken[3:] == [3], "and the next comes again")
        assert (await bench.run())["lineage"] == 0


async def test_a_start_that_stood_by_and_cannot_go_back_ends_the_process(tmp_path: Path) -> None:
    ledger = LedByAnother()
    world = World(tmp_path, ledger=ledger, ledger_lease_s=0.5)
    async with world.life() as bench:
        await trained(bench, steps=2)
    ledger.looks = 2
    async with world.life(**back_to(3), wait_for_version=False) as bench:
        await bench.until(lambda: bench.app.crash.has_happened, "it cannot lead")
        assert not ledger.looks
        assert bench.app.state.terms.problem() is not None


async def test_a_ledger_in_memory_cannot_go_back(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="A ledger in memory keeps no samples"):
        async with World(tmp_path, ledger_url="memory").life(**back_to(0)):
            pass


async def test_a_new_run_begins_behind_the_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path, first_step=41)
    with pytest.raises(StartRefused, match=r"Step 10 .* the last is 40, the first of the run 41"):
        async with world.life(**back_to(10)):
            pass
    world.proxy.applied = 40
    async with world.life(**back_to(40)) as bench:
        await collect(bench, "a")
        await bench.until(lambda: bench.feed.taken == [41], "its first step")
    async with world.life(**back_to(40)) as bench:
        assert await returns(bench) == [(1, 40, "job-2")]


async def test_a_start_is_remembered_however_short_the_history(tmp_path: Path) -> None:
    world = World(tmp_path, applied_steps_kept=3, history_max=1)
    async with world.life() as bench:
        await trained(bench, steps=2)
    world.proxy.applied = 0
    async with world.life(**back_to(1)) as bench:
        for lineage in (2, 3):
            await go_back(bench, 0, lineage=lineage)
        assert await returns(bench) == [(1, 1, "job-2"), (3, 0, None)]
    async with world.life(**back_to(1)) as bench:
        assert await returns(bench) == [(1, 1, "job-2"), (3, 0, None)]
    async with world.life(**back_to(0, "job-3")) as bench:
        assert await returns(bench) == [(3, 0, None), (4, 0, "job-3")]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"resume_from_step": 3}, "needs a start_id"),
        ({**back_to(3), "start": "fresh"}, "a fresh start has no step to resume from"),
        (back_to(-1), "greater than or equal to 0"),
    ],
)
def test_settings_that_would_go_back_again_and_again_are_refused(
    settings: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ValidationError, match=rf"resume_from_step.*\n?.*{rule}"):
        OrchestratorSettings(**settings)


def test_what_earlier_versions_kept_of_a_return_is_of_no_start() -> None:
    record = ReturnRecord(
        lineage=1,
        step=3,
        returned_s=1.0,
        last_step=4,
        steps_again=(4,),
        steps_reduced=(),
        steps_moved=(),
        steps_gone=(),
        rollouts_dropped=(),
        files_missing=(),
    )
    row = return_row(record)
    assert row["report"].endswith(',"start_id":null,"line":[]}')
    earlier = {**row, "report": row["report"].replace(',"start_id":null,"line":[]', "")}
    assert read_return(earlier) == record
