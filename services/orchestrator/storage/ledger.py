"""The ledger in a database: one connection, one transaction per commit.

The event loop hands over rows and never waits for a disk: SQLite works in the driver's thread,
PostgreSQL behind a socket, samples are encoded in a thread.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Final

from sqlalchemy import delete
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.orchestrator.ledger import LedgerFailed, Samples
from services.orchestrator.records import Change, Records
from services.orchestrator.storage import loading, tables
from services.orchestrator.storage.batch import Batch
from services.orchestrator.storage.leadership import Leadership
from services.orchestrator.storage.parts import encoded_parts
from services.orchestrator.storage.rows import Row
from services.orchestrator.storage.samples import UnreadableSamples
from services.orchestrator.storage.statements import Statements
from sideband.batch.types import Sample
from sideband.ids import RolloutId

CLOSE_TIMEOUT_S: Final = 5.0
PIECE_BYTES_MIN: Final = 4 << 20  # encoded at a time: what a commit adds to the memory


class SqlLedger:
    """The records of one run. Made by ``opening.py``, with the schema in place."""

    is_durable = True

    def __init__(
        self,
        engine: AsyncEngine,
        connection: AsyncConnection,
        run_id: str,
        *,
        leadership: Leadership | None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._engine, self._connection, self._run_id = engine, connection, run_id
        self._leadership, self._clock_s = leadership, clock_s
        self._statements = Statements(engine.dialect.name, run_id)
        self._serials: count[int] | None = None
        self._turn = asyncio.Lock()  # one connection carries one call at a time

    async def commit(self, changes: Sequence[Change]) -> None:
        """Make all of ``changes`` durable, in order, or none. Raises LedgerFailed, LeadershipLost.

        Without any it only renews the leadership.
        """
        if not any(changes) and self._leadership is None:
            return
        async with self._turn:
            with translated():
                serials = await self._numbers()
                batch = Batch(changes, serials)
                async with self._connection.begin():
                    if self._leadership is not None:
                        await self._leadership.hold(self._connection)
                    if any(changes):
                        await self._write(batch)

    async def _numbers(self) -> "count[int]":
        if self._serials is None:
            async with self._connection.begin():
                last = await loading.last_serial(self._connection, self._run_id)
            self._serials = count(last + 1)
        return self._serials

    async def _write(self, batch: Batch) -> None:
        connection, statements = self._connection, self._statements
        await statements.delete_where(
            connection, tables.MEMBERS, "group_id", list(batch.groups_closed)
        )
        await statements.delete_where(
            connection, tables.BODIES, "rollout_id", list(batch.bodies_dropped)
        )
        await statements.delete_where(
            connection, tables.FILES, "policy_version", list(batch.versions_forgotten)
        )
        for table, writes in batch.writes.items():
            await statements.write(connection, table, writes)
        await statements.files_deleted(connection, batch.files_deleted)
        rows = body_rows(batch.bodies)
        while some := await asyncio.to_thread(piece_of, rows):
            await statements.put_all(connection, tables.BODIES, some)
        await statements.put(connection, tables.SAVES, {"saved_s": self._clock_s()})

    async def load(self) -> Records | None:
        """Everything that was kept of the run; None when nothing was. Raises LedgerFailed."""
        async with self._turn:
            with translated():
                async with self._connection.begin():
                    return await loading.load(self._connection, self._run_id)

    async def samples(self, rollout_ids: Iterable[RolloutId]) -> Samples:
        """Samples as they were delivered. Raises LedgerFailed."""
        async with self._turn:
            with translated():
                async with self._connection.begin():
                    return await loading.read_samples(self._connection, self._run_id, rollout_ids)

    async def wipe(self) -> None:
        """Forget the run. Raises LedgerFailed, LeadershipLost."""
        async with self._turn:
            with translated():
                async with self._connection.begin():
                    if self._leadership is not None:
                        await self._leadership.hold(self._connection)
                    for table in tables.OF_RUN:
                        statement = delete(table).where(table.c.run_id == self._run_id)
                        await self._connection.execute(statement)

    async def close(self) -> None:
        """Let others lead, and let go of the database."""
        with contextlib.suppress(LedgerFailed, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                with translated():
                    if self._leadership is not None and not self._connection.invalidated:
                        async with self._turn, self._connection.begin():
                            await self._leadership.release(self._connection)
        with contextlib.suppress(LedgerFailed, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                with translated():
                    await self._connection.close()
        with contextlib.suppress(LedgerFailed, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                with translated():
                    await self._engine.dispose()


def body_rows(bodies: Mapping[RolloutId, tuple[Sample, ...]]) -> Iterator[Row]:
    """Rows of ``bodies``, each encoded when it is asked for."""
    for rollout_id, samples in bodies.items():
        count, parts = encoded_parts(samples)
        for part, data in enumerate(parts):
            yield {"rollout_id": rollout_id, "part": part, "parts": count, "samples": data}


def piece_of(rows: Iterator[Row]) -> list[Row]:
    """The next rows that are written by one call: many small ones, or some of a large rollout."""
    piece: list[Row] = []
    piece_bytes = 0
    for row in rows:
        piece.append(row)
        piece_bytes += len(row["samples"])
        if piece_bytes >= PIECE_BYTES_MIN:
            break
    return piece


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Errors of the database become ours, once."""
    try:
        yield
    except (SQLAlchemyError, UnreadableSamples) as exc:
        raise LedgerFailed(f"{type(exc).__name__}: {exc}") from exc
    except OSError as exc:  # the server is not there, or its socket broke
        raise LedgerFailed(str(exc)) from exc
