"""Who leads a run on a shared ledger: one row with a deadline, and a fence that only grows.

A leader renews its row with every commit and at least three times per ``lease_s``; the clock is the
database's. Every commit checks the fence in its own transaction: what a leader that was
overtaken still wants to write is refused, however late it wakes.
"""

from sqlalchemy import ColumnElement, Double, cast, func, select
from sqlalchemy import update as sql_update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.orchestrator.ledger import LeadershipLost
from services.orchestrator.storage.tables import LEADERS


class Leadership:
    """The claim of one process. ``name`` tells clients who leads."""

    def __init__(self, run_id: str, name: str, *, lease_s: float) -> None:
        self._run_id, self._name, self.lease_s = run_id, name, lease_s
        self._fence: int | None = None

    async def take(self, connection: AsyncConnection) -> None:
        """Lead if nobody does. Raises LeadershipLost, which names who does."""
        new = insert(LEADERS).values(
            run_id=self._run_id, fence=1, leader=self._name, expires_s=_now_s() + self.lease_s
        )
        taken = new.on_conflict_do_update(
            index_elements=[LEADERS.c.run_id],
            set_={
                "fence": LEADERS.c.fence + 1,
                "leader": new.excluded.leader,
                "expires_s": new.excluded.expires_s,
            },
            where=LEADERS.c.expires_s < _now_s(),
        ).returning(LEADERS.c.fence)
        fence = await connection.scalar(taken)
        if fence is None:
            raise LeadershipLost(await self._leader(connection))
        self._fence = int(fence)

    async def hold(self, connection: AsyncConnection) -> None:
        """Renew, inside the transaction of a commit. Raises LeadershipLost."""
        renewed = await connection.execute(
            sql_update(LEADERS)
            .where(LEADERS.c.run_id == self._run_id, LEADERS.c.fence == self._fence)
            .values(expires_s=_now_s() + self.lease_s)
        )
        if renewed.rowcount != 1:
            raise LeadershipLost(await self._leader(connection))

    async def release(self, connection: AsyncConnection) -> None:
        """Let the next one lead at once."""
        await connection.execute(
            sql_update(LEADERS)
            .where(LEADERS.c.run_id == self._run_id, LEADERS.c.fence == self._fence)
            .values(expires_s=0.0)
        )

    async def _leader(self, connection: AsyncConnection) -> str:
        statement = select(LEADERS.c.leader).where(LEADERS.c.run_id == self._run_id)
        return str(await connection.scalar(statement) or "")


def _now_s() -> ColumnElement[float]:
    return cast(func.extract("epoch", func.clock_timestamp()), Double)
