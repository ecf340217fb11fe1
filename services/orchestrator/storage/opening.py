"""Opens the ledger that a URL names: connects, migrates, takes the leadership.

``sqlite:///<absolute path>`` is the embedded one. It is opened for one process alone, by a file
lock: no shared memory file is needed then, so that it works on a network filesystem whose locks
are the server's. ``postgresql://…`` is shared: one orchestrator leads, others wait.
"""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog
from sqlalchemy import Connection, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from services.orchestrator.ledger import (
    InMemoryLedger,
    Ledger,
    LedgerError,
    LedgerInUse,
    LedgerMisplaced,
)
from services.orchestrator.storage.leadership import Leadership
from services.orchestrator.storage.ledger import SqlLedger, translated
from services.orchestrator.storage.migrate import migrate
from services.orchestrator.storage.starts import note_start
from sideband.mounts import Locks, Mount, mount_of

log = structlog.get_logger(__name__)
MEMORY: Final = "memory"
DRIVER_END_S: Final = 0.05
DRIVERS: Final = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
# Exclusive first: with it the write-ahead log needs no shared memory. FULL syncs every commit.
PRAGMAS: Final = (
    "PRAGMA locking_mode=EXCLUSIVE",
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=FULL",
    "PRAGMA journal_size_limit=67108864",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPlace:
    """Where a run's ledger is, and as whom this process opens it."""

    url: str
    run_id: str
    name: str  # tells clients who leads
    lease_s: float
    start_id: str | None = None  # under which this process was started
    busy_timeout_s: float = 5.0  # a process that is just ending may still have it open


def url_problem(url: str) -> str | None:
    """Why ``url`` names no ledger; None when it does."""
    if url == MEMORY:
        return None
    try:
        parsed = make_url(url)
    except ArgumentError:
        return f"must be {MEMORY}, sqlite:///<path> or postgresql://<address>"
    if parsed.drivername not in DRIVERS:
        return f"must begin with sqlite:/// or postgresql://, or be {MEMORY}"
    if parsed.drivername == "sqlite" and not (parsed.database or "").startswith("/"):
        return "must name an absolute path: sqlite:////var/lib/…"
    return None


async def open_ledger(
    place: LedgerPlace,
    *,
    clock_s: Callable[[], float] = time.time,
    mount_at: Callable[[Path], Mount] = mount_of,
) -> Ledger:
    """The ledger, led by this process.

    Raises LedgerInUse, LedgerTooNew, LedgerMisplaced, LedgerFailed, LeadershipLost.
    """
    if place.url == MEMORY:
        return InMemoryLedger()
    engine = _engine(place)
    if engine.dialect.name == "sqlite":
        file = Path(str(engine.url.database))
        check_place(file, await asyncio.to_thread(mount_at, file.parent))
    try:
        connection = await _connected(engine, place)
        leadership = None
        if engine.dialect.name == "postgresql":
            leadership = Leadership(place.run_id, place.name, lease_s=place.lease_s)
        ledger = SqlLedger(engine, connection, place.run_id, leadership=leadership, clock_s=clock_s)
    except LedgerError:
        await engine.dispose()
        # The driver ends its thread without waiting for it; the thread still speaks to this loop.
        await asyncio.sleep(DRIVER_END_S)
        raise
    if leadership is None:
        return ledger
    try:
        with translated():
            async with connection.begin():
                await leadership.take(connection)
    except LedgerError:
        with contextlib.suppress(LedgerError), translated():
            await connection.close()
            await engine.dispose()
        raise
    return ledger


def check_place(file: Path, mount: Mount) -> None:
    """Refuse an embedded ledger where a second host could open it too. Raises LedgerMisplaced."""
    facts = {"ledger": str(file), "mount": mount.point, "filesystem": mount.kind}
    if mount.locks is Locks.LOCAL:
        raise LedgerMisplaced(
            f"{file} lies on {mount.point} ({mount.kind}), which is mounted so that file locks "
            "are not seen by other hosts: mount it with the server's locks, put the ledger on a "
            "local disk, or use PostgreSQL"
        )
    if mount.locks is Locks.UNKNOWN:
        log.warning("ledger_locks_unknown", **facts, ask="sideband doctor, on two hosts")


def _engine(place: LedgerPlace) -> AsyncEngine:
    url = make_url(place.url)
    is_embedded = url.drivername == "sqlite"
    arguments: dict[str, Any] = {"timeout": place.busy_timeout_s}
    if not is_embedded:
        arguments = {
            "timeout": place.lease_s,
            "command_timeout": None,  # the journal has the deadline
            "server_settings": {"synchronous_commit": "on", "application_name": "sideband"},
        }
    engine = create_async_engine(
        url.set(drivername=DRIVERS[url.drivername]),
        poolclass=NullPool,
        connect_args=arguments,
        hide_parameters=True,  # rows belong into no log
    )
    if is_embedded:
        event.listen(engine.sync_engine, "connect", _on_connect)
        event.listen(engine.sync_engine, "begin", _on_begin)
    return engine


def _on_connect(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where we say so
    cursor = connection.cursor()
    for pragma in PRAGMAS:
        cursor.execute(pragma)
    cursor.close()


def _on_begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


async def _connected(engine: AsyncEngine, place: LedgerPlace) -> AsyncConnection:
    with translated():
        try:
            return await _migrated(engine, place)
        except (OperationalError, sqlite3.OperationalError) as exc:
            if "locked" in str(exc):
                raise LedgerInUse(f"{place.url} is open in another process") from exc
            raise


async def _migrated(engine: AsyncEngine, place: LedgerPlace) -> AsyncConnection:
    """A connection with the newest schema, where this start is known; else it is closed."""
    async with contextlib.AsyncExitStack() as stack:
        connection = await engine.connect()
        stack.push_async_callback(connection.close)
        async with connection.begin():
            await connection.run_sync(migrate)
            if place.start_id is not None:
                await note_start(connection, place.run_id, place.start_id)
        stack.pop_all()
    return connection
