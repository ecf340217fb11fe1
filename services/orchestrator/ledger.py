"""Where the orchestrator's state is kept: one interface, so that it can become durable.

The service decides on its state in memory (``book.py``), commits the change, and only when
``commit`` has returned does anything leave the process: an answer, a deletion, a step. So the
memory may be ahead of the ledger, never the outside world. A commit that fails ends the process.
"""

from typing import Protocol

from services.orchestrator.records import Change


class Ledger(Protocol):
    """Durable records by id. One writer."""

    async def commit(self, change: Change) -> None:
        """Make all of ``change`` durable, or none. Calls are kept in order.

        Records replace earlier ones of the same id; ``bodies`` hold what a rollout was made
        from and may be forgotten when it is trained or dropped.
        """

    async def close(self) -> None:
        """Everything committed is safe; no more calls."""


class InMemoryLedger:
    """Keeps nothing beyond what the book holds in memory anyway: lost with the process."""

    def __init__(self) -> None:
        self.commits = 0

    async def commit(self, change: Change) -> None:
        """Nothing is durable here, so nothing is kept: old samples must not be pinned."""
        self.commits += bool(change)

    async def close(self) -> None:
        """Nothing to do."""
