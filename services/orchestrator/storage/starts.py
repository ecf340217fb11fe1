"""Under which ids processes were started for a run, in the order in which they were first seen.

An id is noted as soon as its process opens the ledger, whether it leads or stands by. So of two ids
the ledger knows which came first, whoever led meanwhile, and also when the run is wiped.
"""

from typing import Final

from sqlalchemy import delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from services.orchestrator.storage.tables import START_IDS

START_IDS_MAX: Final = 1000  # of one run; an older one that comes again is taken for new


async def note_start(connection: AsyncConnection, run_id: str, start_id: str) -> None:
    """Remember ``start_id`` if it is new. In the transaction of the migration: one at a time."""
    of_run = START_IDS.c.run_id == run_id
    known = select(START_IDS.c.number).where(of_run, START_IDS.c.start_id == start_id)
    if await connection.scalar(known) is not None:
        return
    last = await connection.scalar(select(func.max(START_IDS.c.number)).where(of_run)) or 0
    row = {"run_id": run_id, "start_id": start_id, "number": last + 1}
    await connection.execute(insert(START_IDS).values(row))
    oldest = START_IDS.c.number <= last + 1 - START_IDS_MAX
    await connection.execute(delete(START_IDS).where(of_run, oldest))


async def latest_start(connection: AsyncConnection, run_id: str) -> str | None:
    """The id that came last; None when no process of this run has had one."""
    statement = (
        select(START_IDS.c.start_id)
        .where(START_IDS.c.run_id == run_id)
        .order_by(START_IDS.c.number.desc())
        .limit(1)
    )
    found: str | None = await connection.scalar(statement)
    return found
