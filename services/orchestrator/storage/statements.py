"""The statements of the ledger, one of each kind for each table. Made once per dialect."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from sqlalchemy import Delete, Insert, Table, bindparam, delete, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from services.orchestrator.limits import ROWS_PER_CALL_MAX
from services.orchestrator.storage import tables
from services.orchestrator.storage.batch import Writes
from services.orchestrator.storage.rows import Row


class Statements:
    """Upserts and deletions by key, for one dialect and one run."""

    def __init__(self, dialect: str, run_id: str) -> None:
        self._run_id = run_id
        self._upserts = {table: _upsert(table, dialect) for table in tables.OF_RUN}
        self._deletes = {table: _delete(table) for table in tables.OF_RUN}

    async def write(self, connection: AsyncConnection, table: Table, writes: Writes) -> None:
        """Carry out the writes of one table, deletions first."""
        names = [column.name for column in table.primary_key if column.name != "run_id"]
        gone = [
            dict(zip([f"key_{name}" for name in names], key, strict=True))
            for key, row in writes.items()
            if row is None
        ]
        for some in _pieces([{"key_run_id": self._run_id, **key} for key in gone]):
            await connection.execute(self._deletes[table], some)
        kept = [{"run_id": self._run_id, **row} for row in writes.values() if row is not None]
        for some in _pieces(kept):
            await connection.execute(self._upserts[table], some)

    async def put(self, connection: AsyncConnection, table: Table, row: Row) -> None:
        """Write one row."""
        await self.put_all(connection, table, [row])

    async def put_all(self, connection: AsyncConnection, table: Table, rows: list[Row]) -> None:
        """Write some rows in one call."""
        await connection.execute(
            self._upserts[table], [{"run_id": self._run_id, **row} for row in rows]
        )

    async def delete_where(
        self, connection: AsyncConnection, table: Table, column: str, values: Sequence[Any]
    ) -> None:
        """Delete the rows of the run whose ``column`` is one of ``values``."""
        if values:
            statement = delete(table).where(
                table.c.run_id == bindparam("key_run_id"), table.c[column] == bindparam("key")
            )
            keys = [{"key_run_id": self._run_id, "key": value} for value in values]
            for some in _pieces(keys):
                await connection.execute(statement, some)

    async def files_deleted(self, connection: AsyncConnection, files: Iterable[str]) -> None:
        """Say of given-up files that they are gone; of those that are still known."""
        keys = [{"key_run_id": self._run_id, "key": file, "gone": False} for file in files]
        for some in _pieces(keys):
            await connection.execute(_FILE_DELETED, some)


_FILE_DELETED: Final = (
    update(tables.FILES)
    .where(
        tables.FILES.c.run_id == bindparam("key_run_id"), tables.FILES.c.file == bindparam("key")
    )
    .values(is_pending=bindparam("gone"))
)


def _upsert(table: Table, dialect: str) -> Insert:
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    statement = insert(table)
    rest = {
        column.name: statement.excluded[column.name]
        for column in table.columns
        if not column.primary_key
    }
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=rest)


def _delete(table: Table) -> Delete:
    statement = delete(table)
    for column in table.primary_key:
        statement = statement.where(column == bindparam(f"key_{column.name}"))
    return statement


def _pieces(rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """So that one call does not hold the event loop for long."""
    for first in range(0, len(rows), ROWS_PER_CALL_MAX):
        yield rows[first : first + ROWS_PER_CALL_MAX]
