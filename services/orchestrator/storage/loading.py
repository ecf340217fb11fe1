"""Reads a run back. Rows come in pieces, so that the event loop is never held for long."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, TypeVar

from sqlalchemy import Select, Table, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from services.orchestrator.limits import ROWS_PER_CALL_MAX
from services.orchestrator.records import HELD_STATES, Records, Rollout, RolloutState
from services.orchestrator.storage import rows, tables
from services.orchestrator.storage.parts import BodiesRead
from services.orchestrator.storage.rows import Row
from services.orchestrator.storage.starts import latest_start
from sideband.batch.types import Sample
from sideband.ids import RolloutId

R = TypeVar("R")
ROLLOUTS_PER_READ: Final = 32  # a few megabytes by handle
PARTS_PER_READ: Final = 32  # and what reading adds to the memory


async def load(connection: AsyncConnection, run_id: str) -> Records | None:
    """Everything of the run; None when it has no row."""
    found = [row async for row in _rows(connection, _all_of(tables.RUNS, run_id))]
    if not found:
        return None
    run = rows.read_run(found[0])
    starts = await _read(connection, tables.STARTS, run_id, rows.read_start, order=None)
    saved = await connection.scalar(
        select(tables.SAVES.c.saved_s).where(tables.SAVES.c.run_id == run_id)
    )
    steps = await _read(connection, tables.STEPS, run_id, rows.read_step)
    built = {record.step for record in steps}
    rollouts = [row async for row in _rows(connection, _all_of(tables.ROLLOUTS, run_id, "serial"))]
    wanted = [RolloutId(row["rollout_id"]) for row in rollouts if _needs_samples(row, built)]
    samples = await read_samples(connection, run_id, wanted)
    return Records(
        run=run,
        leases=await _read(connection, tables.LEASES, run_id, rows.read_lease),
        rollouts=await _each(rollouts, lambda row: _rollout(row, samples)),
        groups=await _read(connection, tables.GROUPS, run_id, rows.read_group),
        members=await _read(connection, tables.MEMBERS, run_id, rows.read_member, order=None),
        steps=steps,
        files={
            row["file"]: bool(row["is_pending"])
            async for row in _rows(connection, _all_of(tables.FILES, run_id))
        },
        start=next(iter(starts), None),
        latest_start=await latest_start(connection, run_id),
        policies=await _read(connection, tables.POLICIES, run_id, rows.read_policy, order="number"),
        returns=await _read(connection, tables.RETURNS, run_id, rows.read_return, order="lineage"),
        saved_s=float(saved or 0.0),
    )


async def last_serial(connection: AsyncConnection, run_id: str) -> int:
    """The highest serial that the run has used."""
    found = 0
    for table in (tables.LEASES, tables.ROLLOUTS, tables.GROUPS, tables.STEPS):
        statement = select(func.max(table.c.serial)).where(table.c.run_id == run_id)
        found = max(found, await connection.scalar(statement) or 0)
    return found


async def read_samples(
    connection: AsyncConnection, run_id: str, rollout_ids: Iterable[RolloutId]
) -> dict[RolloutId, tuple[Sample, ...]]:
    """Samples as delivered; decoded in a thread, some rollouts at a time."""
    found: dict[RolloutId, tuple[Sample, ...]] = {}
    columns, names = tables.BODIES.c, list(rollout_ids)
    for first in range(0, len(names), ROLLOUTS_PER_READ):
        some = names[first : first + ROLLOUTS_PER_READ]
        statement = (
            select(columns.rollout_id, columns.part, columns.parts, columns.samples)
            .where(columns.run_id == run_id, columns.rollout_id.in_(some))
            .order_by(columns.rollout_id, columns.part)
        )
        bodies = BodiesRead()
        result = await connection.stream(statement, execution_options={"yield_per": PARTS_PER_READ})
        async for parts in result.partitions():
            await asyncio.to_thread(bodies.take, [tuple(part) for part in parts])
        found |= await asyncio.to_thread(bodies.samples)
    return found


def _needs_samples(row: Row, built: set[int]) -> bool:
    state = RolloutState(row["state"])
    return state in HELD_STATES or (state is RolloutState.PACKED and row["step"] not in built)


def _rollout(row: Row, samples: dict[RolloutId, tuple[Sample, ...]]) -> Rollout:
    return rows.read_rollout(row, samples.get(RolloutId(row["rollout_id"]), ()))


def _all_of(table: Table, run_id: str, order: str | None = None) -> Select[tuple[object, ...]]:
    statement: Select[tuple[object, ...]] = select(table).where(table.c.run_id == run_id)
    return statement if order is None else statement.order_by(table.c[order])


async def _rows(
    connection: AsyncConnection, statement: Select[tuple[object, ...]]
) -> AsyncIterator[Row]:
    result = await connection.stream(statement)
    async for some in result.mappings().partitions(ROWS_PER_CALL_MAX):
        for row in some:
            yield dict(row)


async def _read(
    connection: AsyncConnection,
    table: Table,
    run_id: str,
    read: Callable[[Row], R],
    *,
    order: str | None = "serial",
) -> list[R]:
    found = [row async for row in _rows(connection, _all_of(table, run_id, order))]
    return await _each(found, read)


async def _each(found: list[Row], read: Callable[[Row], R]) -> list[R]:
    records: list[R] = []
    for row in found:
        records.append(read(row))
        if len(records) % ROWS_PER_CALL_MAX == 0:
            await asyncio.sleep(0)
    return records
