"""Every durable ledger keeps exactly what was committed: one suite, each database."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import select, update

from services.orchestrator.history import StartRecord
from services.orchestrator.ledger import LeadershipLost, LedgerFailed, LedgerInUse
from services.orchestrator.records import Change, Records
from services.orchestrator.restoring import restore
from services.orchestrator.storage import opening, starts, tables
from services.orchestrator.storage.ledger import SqlLedger
from services.orchestrator.storage.opening import LedgerPlace, open_ledger
from services.orchestrator.storage.samples import decode_samples, encode_samples
from sideband.batch.types import Sample
from sideband.testing.batches import NARROW_MODEL, make_sample
from tests import postgres
from tests.services.orchestrator.dump import dump, rollout_facts, sample_facts, step_facts
from tests.services.orchestrator.histories import SeededHistory
from tests.services.orchestrator.plain_ledger import PlainLedger
from tests.services.orchestrator.test_book import RULES

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with postgres.server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
async def open_one(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    """Opens the test's own ledger; several times, under several names."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/ledger.sqlite3"
    else:
        url = request.getfixturevalue("postgres_url")
    run_id = f"run-{tmp_path.name}"[-100:]
    opened: list[SqlLedger] = []

    async def open_it(
        name: str = "one",
        *,
        run: str = run_id,
        lease_s: float = 60.0,
        start_id: str | None = None,
    ) -> SqlLedger:
        place = LedgerPlace(
            url=url,
            run_id=run,
            name=name,
            lease_s=lease_s,
            start_id=start_id,
            busy_timeout_s=0.1,
        )
        ledger = await open_ledger(place, clock_s=lambda: 77.0)
        assert isinstance(ledger, SqlLedger)
        opened.append(ledger)
        return ledger

    yield open_it
    for ledger in opened:
        await ledger.close()


def batched(changes: Iterable[Change], size: int) -> Iterator[list[Change]]:
    """Pieces of ``size`` changes."""
    changes = iter(changes)
    while some := list(islice(changes, size)):
        yield some


def facts(records: Records | None) -> dict[str, Any]:
    """Records as plain data, orders included."""
    assert records is not None
    return {
        "run": records.run,
        "leases": records.leases,
        "rollouts": [rollout_facts(rollout) for rollout in records.rollouts],
        "groups": records.groups,
        "members": sorted(records.members, key=lambda member: (member.group_id, member.index)),
        "steps": [step_facts(record) for record in records.steps],
        "files": records.files,
        "returns": records.returns,
        "policies": records.policies,
        "start": records.start,
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("history_max", [3, 1000])
async def test_a_ledger_keeps_what_was_committed_and_nothing_else(
    open_one: Open, seed: int, history_max: int
) -> None:
    plain, ledger = PlainLedger(), await open_one()
    rules = replace(RULES, history_max=history_max, steps_kept=seed)
    history = SeededHistory(seed, rules, returns=min(seed, 1))
    assert await ledger.load() is None
    begun = Change(start=StartRecord(start_id="job-7" if seed else None, begun_s=5.5))
    plain.apply([begun])
    await ledger.commit([begun])
    # Many decisions in one commit, as under load.
    for changes in batched(history.changes(250), 1 + seed * 7):
        plain.apply(changes)
        await ledger.commit(changes)
    assert history.built > 4, "the history got somewhere"
    assert bool(history.book.returns) is bool(seed)
    assert facts(await ledger.load()) == facts(plain.records())
    kept = plain.bodies.keys()
    found = await ledger.samples([*kept, *history.book.rollouts])
    assert found.keys() == kept, "only what may still have to be packed"
    assert {name: encode_samples(samples) for name, samples in found.items()} == plain.bodies

    await ledger.close()
    again = await open_one("two")
    records = await again.load()
    assert facts(records) == facts(plain.records()), "another process sees the same"
    assert records.saved_s == 77.0
    restored, change = restore(records, history.book.rules)
    assert not change
    assert dump(restored) == dump(history.book)
    for changes in batched(history.changes(60), 4):  # and goes on where the first one was
        plain.apply(changes)
        await again.commit(changes)
    assert facts(await again.load()) == facts(plain.records())


async def test_runs_do_not_mix_and_a_wiped_one_leaves_the_others(open_one: Open) -> None:
    first = await open_one()
    for change in SeededHistory(5).changes(50):
        await first.commit([change])
    before = facts(await first.load())
    await first.close()
    second = await open_one("one", run="other-run")
    assert await second.load() is None
    for change in SeededHistory(6).changes(50):
        await second.commit([change])
    await second.wipe()
    assert await second.load() is None
    await second.close()
    again = await open_one()
    assert facts(await again.load()) == before


async def test_a_failed_commit_keeps_nothing_of_it(open_one: Open) -> None:
    ledger = await open_one()
    history = SeededHistory(1)
    changes = list(history.changes(40))
    await ledger.commit(changes[:20])
    before = facts(await ledger.load())
    bad = Change(files_deleted=["v0/run/00/" + "x" * 20])
    bad.groups = [replace(next(g for c in changes for g in c.groups), size="many")]  # type: ignore[arg-type]
    bad.groups.append(replace(bad.groups[0], size=None))  # type: ignore[arg-type]
    with pytest.raises(LedgerFailed):
        await ledger.commit([*changes[20:], bad])
    await ledger.close()
    again = await open_one()
    assert facts(await again.load()) == before


async def test_the_migrations_make_the_tables_that_the_code_speaks_of(open_one: Open) -> None:
    ledger = await open_one()

    def differences(connection: Any) -> list[Any]:
        options = {"version_table": "ledger_schema", "compare_type": True}
        context = MigrationContext.configure(connection, opts=options)
        found: list[Any] = compare_metadata(context, tables.METADATA)
        return found

    async with ledger._connection.begin():
        assert await ledger._connection.run_sync(differences) == []


async def test_rows_are_found_by_their_whole_key_though_planned_while_nothing_is_there(
    open_one: Open,
) -> None:
    """PostgreSQL keeps a plan for as long as the connection; later it would read a run's rows."""
    connection = (await open_one())._connection
    explain, key = {
        "postgresql": ("EXPLAIN", "{}_pkey"),
        "sqlite": ("EXPLAIN QUERY PLAN", "sqlite_autoindex_{}_1"),
    }[connection.dialect.name]
    async with connection.begin():
        for table in tables.OF_RUN:
            where = " AND ".join(f"{column.name} = '1'" for column in table.primary_key)
            plan = await connection.exec_driver_sql(f"{explain} DELETE FROM {table} WHERE {where}")
            lines = "\n".join(str(row) for row in plan)
            assert key.format(table) in lines, lines


DURABLE: dict[str, dict[str, tuple[object, ...]]] = {
    "postgresql": {
        # Not the server's own default, which an operator may have relaxed.
        "SELECT setting, source FROM pg_settings WHERE name = 'synchronous_commit'": (
            "on",
            "client",
        ),
    },
    "sqlite": {
        "PRAGMA synchronous": (2,),
        "PRAGMA journal_mode": ("wal",),
        "PRAGMA locking_mode": ("exclusive",),
    },
}


async def test_a_commit_waits_for_the_disk(open_one: Open) -> None:
    """No power is cut here: what the database promises then is asked for."""
    connection = (await open_one())._connection
    async with connection.begin():
        for question, answer in DURABLE[connection.dialect.name].items():
            found = (await connection.exec_driver_sql(question)).one()
            assert tuple(found) == answer, question


async def test_processes_that_start_at_once_migrate_once(postgres_url: str) -> None:
    async def start(number: int) -> None:
        place = LedgerPlace(url=postgres_url, run_id=f"start-{number}", name="n", lease_s=5)
        await (await open_ledger(place)).close()

    await asyncio.gather(*(start(number) for number in range(6)))


async def test_the_embedded_ledger_is_refused_to_a_second_process(tmp_path: Path) -> None:
    place = LedgerPlace(
        url=f"sqlite:///{tmp_path}/l.sqlite3",
        run_id="run",
        name="one",
        lease_s=5,
        busy_timeout_s=0.1,
    )
    first = await open_ledger(place)
    with pytest.raises(LedgerInUse, match="open in another process"):
        await open_ledger(place)
    await first.close()
    await (await open_ledger(place)).close()


async def until_s(ledger: SqlLedger, run_id: str) -> float:
    """The time until which a leader of the run leads, by the database's clock."""
    async with ledger._connection.begin():
        led = select(tables.LEADERS.c.expires_s).where(tables.LEADERS.c.run_id == run_id)
        return float(await ledger._connection.scalar(led) or 0.0)


async def test_one_leads_and_a_late_writer_is_fenced_off(postgres_url: str) -> None:
    place = LedgerPlace(url=postgres_url, run_id="fenced", name="first", lease_s=600)
    first = await open_ledger(place)
    assert isinstance(first, SqlLedger)
    changes = list(SeededHistory(2).changes(10))
    await first.commit(changes[:5])
    with pytest.raises(LeadershipLost, match="first leads"):
        await open_ledger(replace(place, name="second"))
    for _ in range(2):  # renewed by empty commits too
        before_s = await until_s(first, place.run_id)
        await first.commit([])
        assert await until_s(first, place.run_id) > before_s
    with pytest.raises(LeadershipLost):
        await open_ledger(replace(place, name="second"))
    async with first._connection.begin():  # it sleeps for longer than its lease
        asleep = update(tables.LEADERS).where(tables.LEADERS.c.run_id == place.run_id)
        await first._connection.execute(asleep.values(expires_s=0.0))
    second = await open_ledger(replace(place, name="second"))
    with pytest.raises(LeadershipLost, match="second leads"):
        await first.commit(changes[5:])
    with pytest.raises(LeadershipLost, match="second leads"):
        await first.wipe()
    await first.close()
    await second.commit(changes[5:])
    await second.close()
    third = await open_ledger(replace(place, name="third"))  # at once: it was given back
    assert await third.load() is not None
    await third.close()


async def test_a_server_that_is_not_there_is_a_ledger_error() -> None:
    place = LedgerPlace(url="postgresql://u@127.0.0.1:1/x", run_id="r", name="n", lease_s=1)
    with pytest.raises(LedgerFailed):
        await open_ledger(place)


async def test_a_ledger_in_a_folder_that_is_not_there_is_a_ledger_error(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/no/such/folder/l.sqlite3"
    with pytest.raises(LedgerFailed):
        await open_ledger(LedgerPlace(url=url, run_id="r", name="n", lease_s=1))


SAMPLES: tuple[Sample, ...] = (
    make_sample(1, tokens=1, prompt_tokens=0, form=None),
    make_sample(2, tokens=9, form="handle", breaks=(3,), gaps=((4, 6),)),
    make_sample(3, tokens=9, form="inline", with_weight_versions=True),
    make_sample(4, tokens=17, form="inline", model=NARROW_MODEL, gaps=((0, 2),)),
)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.sample_id)
def test_samples_survive_as_they_are(sample: Sample) -> None:
    (found,) = decode_samples(encode_samples((sample,)))
    assert sample_facts(found) == sample_facts(sample)


@pytest.mark.parametrize(
    ("url", "is_good"),
    [
        ("memory", True),
        ("sqlite:////var/lib/ledger.sqlite3", True),
        ("postgresql://user:secret@host/db", True),
        ("sqlite:///relative.sqlite3", False),
        ("sqlite://", False),
        ("mysql://host/db", False),
        ("not a url", False),
    ],
)
def test_a_url_that_names_no_ledger_is_refused(url: str, is_good: bool) -> None:
    assert (opening.url_problem(url) is None) is is_good


async def test_the_newest_start_is_known_whoever_led_and_whatever_was_wiped(
    open_one: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def led_by(start_id: str | None) -> str | None:
        ledger = await open_one(start_id=start_id)
        await ledger.commit(list(SeededHistory(1).changes(0)))
        records = await ledger.load()
        assert records is not None
        await ledger.wipe()
        await ledger.close()
        latest: str | None = records.latest_start
        return latest

    assert await led_by(None) is None
    for start_id, latest in (("b", "b"), ("a", "a"), ("b", "a"), (None, "a"), ("a", "a")):
        assert await led_by(start_id) == latest
    other = await open_one(run="another", start_id="z")
    await other.close()
    assert await led_by("a") == "a", "of its own run"
    monkeypatch.setattr(starts, "START_IDS_MAX", 2)
    assert [await led_by(name) for name in ("c", "a", "b")] == ["c", "c", "b"], "b was forgotten"


async def test_a_start_that_only_stood_by_is_known(open_one: Open) -> None:
    leader = await open_one("leader", start_id="b")
    if leader._leadership is None:
        pytest.skip("an embedded ledger has no standby")
    with pytest.raises(LeadershipLost):
        await open_one("standby", start_id="a")
    await leader.close()
    for start_id in ("c", "a"):
        ledger = await open_one(start_id=start_id)
        await ledger.commit(list(SeededHistory(1).changes(0)))
        records = await ledger.load()
        assert (records.latest_start, records.is_older_start("a")) == ("c", True)
        await ledger.close()
