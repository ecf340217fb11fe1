"""A ledger that an earlier version made is opened with all that it has; one of a later is refused.

The rows are those of today, without the columns and tables that there were not yet.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, MetaData, Table, inspect, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from services.orchestrator.ledger import LedgerTooNew
from services.orchestrator.storage import tables
from services.orchestrator.storage.ledger import SqlLedger
from services.orchestrator.storage.migrate import MIGRATIONS, VERSION_TABLE
from services.orchestrator.storage.opening import DRIVERS, LedgerPlace, open_ledger
from tests import postgres
from tests.services.orchestrator.histories import SeededHistory
from tests.services.orchestrator.test_ledgers import facts

REVISIONS: Final = ["0001", "0002", "0003", "0004", "0005", "0006", "0007"]
SINCE: Final = {"returns": "0002", "policies": "0003", "start": "0004"}  # of records
Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with postgres.server() as url:
        yield url


@dataclass(frozen=True, slots=True, kw_only=True)
class Databases:
    """Empty ones of one kind."""

    kind: str
    at: str

    async def place(self, name: str) -> LedgerPlace:
        """Where a ledger of its own is."""
        url = f"sqlite:///{self.at}/{name}.sqlite3"
        if self.kind == "postgresql":
            engine = create_async_engine(async_url(self.at), isolation_level="AUTOCOMMIT")
            async with engine.connect() as connection:
                await connection.execute(text(f'CREATE DATABASE "{name}"'))
            await engine.dispose()
            url = self.at.rsplit("/", 1)[0] + f"/{name}"
        return LedgerPlace(url=url, run_id="run-1", name="one", lease_s=60.0)


@pytest.fixture(params=["sqlite", "postgresql"])
def databases(request: pytest.FixtureRequest, tmp_path: Path) -> Databases:
    at = str(tmp_path)
    if request.param == "postgresql":
        at = request.getfixturevalue("postgres_url")
    return Databases(kind=request.param, at=at)


def async_url(url: str) -> Any:
    parsed = make_url(url)
    return parsed.set(drivername=DRIVERS[parsed.drivername])


async def opened(place: LedgerPlace) -> SqlLedger:
    ledger = await open_ledger(place, clock_s=lambda: 77.0)
    assert isinstance(ledger, SqlLedger)
    return ledger


async def rows_of(ledger: SqlLedger) -> Rows:
    """Everything of the run, by table."""
    found: Rows = {}
    async with ledger._connection.begin():
        for table in tables.OF_RUN:
            result = await ledger._connection.execute(select(table))
            found[table.name] = [dict(row) for row in result.mappings()]
    assert {row["parts"] for row in found["body_parts"]} == {1}
    return found | {"bodies": found["body_parts"]}  # as they were called before 0007


def upgrade(connection: Connection, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


async def make_old(place: LedgerPlace, revision: str, rows: Rows) -> None:
    """The ledger as a version that knew schemas up to ``revision`` had left it."""

    def fill(connection: Connection) -> None:
        upgrade(connection, revision)
        for name in inspect(connection).get_table_names():
            if rows.get(name):
                table = Table(name, MetaData(), autoload_with=connection)
                known = [{k: row[k] for k in row if k in table.columns} for row in rows[name]]
                connection.execute(table.insert(), known)

    engine = create_async_engine(async_url(place.url))
    async with engine.begin() as connection:
        await connection.run_sync(fill)
    await engine.dispose()


def differences(connection: Connection) -> list[Any]:
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    found: list[Any] = compare_metadata(context, tables.METADATA)
    return found


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_ledger_of_before_is_opened_with_all_that_it_has(
    databases: Databases, revision: str
) -> None:
    history = SeededHistory(3, returns=int(revision >= SINCE["returns"]))
    changes = list(history.changes(150))
    ledger = await opened(await databases.place(f"now{revision}"))
    await ledger.commit(changes)
    expected, rows = await ledger.load(), await rows_of(ledger)
    assert expected is not None
    assert expected.steps
    assert expected.files
    assert bool(expected.returns) is (revision >= SINCE["returns"])
    empty: dict[str, Any] = {"returns": [], "policies": [], "start": None}
    missing = {name: empty[name] for name, since in SINCE.items() if revision < since}
    kept = await ledger.samples(history.book.rollouts)

    place = await databases.place(f"old{revision}")
    await make_old(place, revision, rows)
    old = await opened(place)
    assert facts(await old.load()) == facts(replace(expected, **missing))
    assert (await old.samples(history.book.rollouts)).keys() == kept.keys()
    async with old._connection.begin():
        assert await old._connection.run_sync(differences) == []

    later = list(history.changes(40))
    for one in (ledger, old):
        await one.commit(later)
    found, wanted = facts(await old.load()), facts(await ledger.load())
    for name in missing:
        assert len(found.pop(name) or []) <= len(wanted.pop(name) or [])
    assert found == wanted, "and goes on"
    for one in (ledger, old):
        await one.close()


async def test_a_ledger_of_a_later_version_is_refused_by_name_and_left_alone(
    databases: Databases,
) -> None:
    place = await databases.place("later")
    ledger = await opened(place)
    await ledger.commit(list(SeededHistory(3).changes(20)))
    before = await rows_of(ledger)
    async with ledger._connection.begin():
        await ledger._connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    await ledger.close()
    for _ in range(2):
        with pytest.raises(LedgerTooNew, match=r"schema 9999 of a newer .* up to \d{4}"):
            await opened(place)
    engine = create_async_engine(async_url(place.url))
    async with engine.connect() as connection:
        for table in tables.OF_RUN:
            result = await connection.execute(select(table))
            assert [dict(row) for row in result.mappings()] == before[table.name]
    await engine.dispose()


def test_every_schema_before_the_last_is_tried() -> None:
    names = sorted(path.name[1:5] for path in (MIGRATIONS / "versions").glob("v0*.py"))
    assert names[:-1] == REVISIONS
