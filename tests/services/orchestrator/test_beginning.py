"""A fresh start under a supervisor begins the run once, and never wipes what it began."""

from pathlib import Path

import pytest

from services.orchestrator.beginning import RunBegun, StartOutdated, begins_anew
from services.orchestrator.history import StartRecord
from services.orchestrator.records import Change
from sideband.ids import RunId
from tests.services.orchestrator.histories import SeededHistory
from tests.services.orchestrator.plain_ledger import PlainLedger
from tests.services.orchestrator.support import files_of
from tests.services.orchestrator.test_resume import World, collect


async def test_a_pod_that_is_restarted_with_the_same_settings_goes_on(tmp_path: Path) -> None:
    world = World(tmp_path, step_rollouts=9, start="fresh", start_id="job-7")
    async with world.life() as bench:
        kept = await collect(bench, "a")
    for _ in range(3):  # a crash loop
        async with world.life() as bench:
            assert bench.on_disk() == files_of(kept)
            assert (await bench.http.get("/v1/rollouts/a")).json()["state"] == "ready"
    async with world.life(start_id="job-8") as bench:
        assert not bench.on_disk()
        assert (await bench.http.get("/v1/rollouts/a")).status_code == 404
    async with world.life(start_id="job-8") as bench:  # nor does the ledger know it any more
        assert (await bench.http.get("/v1/rollouts/a")).status_code == 404
        assert (await bench.http.get("/v1/leases")).json()["leases"] == []
        assert (await bench.http.get("/v1/run/resumption")).json()["rollouts_dropped"] == []


async def test_without_an_id_a_run_that_has_work_is_not_wiped(tmp_path: Path) -> None:
    world = World(tmp_path, step_rollouts=9, start="fresh")
    async with world.life() as bench:
        kept = await collect(bench, "a")
    with pytest.raises(RunBegun, match=r"1 rollouts, 0 steps.*START=resume.*START_ID"):
        async with world.life():
            pass
    async with world.life(start="resume") as bench:
        assert bench.on_disk() == files_of(kept)


@pytest.mark.parametrize("start_id", [None, "job-7"])
async def test_a_run_that_has_ended_is_begun_anew_unless_its_own_id_says_so(
    tmp_path: Path, start_id: str | None
) -> None:
    world = World(tmp_path, start="fresh", start_id=start_id)
    async with world.life() as bench:
        await bench.http.post("/v1/admin/drain")
        await bench.until(lambda: bench.service.book.run.is_terminal, "it ends")
        await bench.service.settled()
    async with world.life() as bench:
        assert (await bench.run())["phase"] == ("running" if start_id is None else "ended")


async def test_a_run_without_work_is_begun_anew(tmp_path: Path) -> None:
    world = World(tmp_path, start="fresh")
    for _ in range(2):
        async with world.life() as bench:
            assert (await bench.http.get("/v1/leases")).json()["leases"] == []


def test_a_ledger_that_does_not_know_its_start_is_not_wiped_by_any_id() -> None:
    ledger = PlainLedger()
    ledger.apply(list(SeededHistory(1).changes(30)))
    records = ledger.records()
    with pytest.raises(RunBegun):
        begins_anew(records, start="fresh", start_id="job-7", run_id=RunId("run"))
    ledger.apply([Change(start=StartRecord(start_id=None, begun_s=1.0))])

    def decide(start_id: str | None) -> bool:
        return begins_anew(ledger.records(), start="fresh", start_id=start_id, run_id=RunId("run"))

    assert decide("job-7"), "an id that did not begin it wipes it"
    with pytest.raises(RunBegun):
        decide(None)
    assert not begins_anew(records, start="resume", start_id="job-7", run_id=RunId("run"))
    assert begins_anew(None, start="fresh", start_id=None, run_id=RunId("run"))


async def test_a_start_that_is_older_than_the_run_never_wipes_it(tmp_path: Path) -> None:
    world = World(tmp_path, step_rollouts=9, start="fresh")
    async with world.life(start_id="job-7"):
        pass
    async with world.life(start_id="job-8") as bench:
        kept = await collect(bench, "a")
    with pytest.raises(StartOutdated, match=r"job-7 is older than start job-8.*START_ID"):
        async with world.life(start_id="job-7"):
            pass
    for settings in ({"start_id": "job-8"}, {"start_id": "job-7", "start": "resume"}):
        async with world.life(**settings) as bench:
            assert bench.on_disk() == files_of(kept)
            assert (await bench.http.get("/v1/rollouts/a")).json()["state"] == "ready"
    async with world.life(start_id="job-9") as bench:
        assert not bench.on_disk(), "a new id says that it is meant"
