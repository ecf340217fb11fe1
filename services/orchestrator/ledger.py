"""Where the orchestrator's state is kept: one interface, in memory or durable.

The service decides on its state in memory (``book.py``), makes the change durable, and only then
does anything leave the process: an answer, a deletion, a step. So the memory may be ahead of the
ledger, never the outside world. After a failed commit the memory is worth nothing: ``terms.py``
throws it away and begins again from what the ledger has.

LedgerError
├── LedgerFailed        it did not answer, refused, or its disk is full: nothing is known to be kept
├── LedgerInUse         another process has the embedded ledger open
├── LedgerTooNew        a newer Sideband made its tables
├── LedgerMisplaced     an embedded ledger where a lock keeps no other host out
└── LeadershipLost      another orchestrator leads the run
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from services.orchestrator.records import Change, Records
from sideband.batch.types import Sample
from sideband.ids import RolloutId

Samples = Mapping[RolloutId, tuple[Sample, ...]]


class LedgerError(Exception):
    """The ledger cannot be used now."""


class LedgerFailed(LedgerError):
    """A call failed. Whether its change was kept is not known: read it again."""


class LedgerInUse(LedgerError):
    """The embedded ledger serves one process at a time."""


class LedgerTooNew(LedgerError):
    """A newer Sideband has opened it: ``found`` is its schema, ``newest`` the last known here."""

    def __init__(self, found: str, *, newest: str) -> None:
        self.found, self.newest = found, newest
        super().__init__(
            f"the ledger has schema {found} of a newer Sideband, this one knows schemas up to "
            f"{newest}: start that one"
        )


class LedgerMisplaced(LedgerError):
    """Two orchestrators on two hosts could write an embedded ledger there, and ruin it."""


class LeadershipLost(LedgerError):
    """Another orchestrator leads; ``leader`` names it where that is known."""

    def __init__(self, leader: str) -> None:
        self.leader = leader
        super().__init__(f"{leader or 'another orchestrator'} leads the run")


class Ledger(Protocol):
    """Durable records of one run. One writer. Errors: LedgerError."""

    @property
    def is_durable(self) -> bool:
        """Whether a new process would find them."""

    async def commit(self, changes: Sequence[Change]) -> None:
        """Make all of ``changes`` durable, in order, or none. Without any it only makes sure that
        this process still leads.
        """

    async def load(self) -> Records | None:
        """Everything that was kept of the run; None when nothing was."""

    async def samples(self, rollout_ids: Iterable[RolloutId]) -> Samples:
        """Samples as they were delivered, of rollouts whose step is not closed."""

    async def wipe(self) -> None:
        """Forget the run."""

    async def close(self) -> None:
        """No more calls."""


class InMemoryLedger:
    """Keeps nothing beyond what the book holds in memory anyway: lost with the process."""

    is_durable = False

    def __init__(self) -> None:
        self.commits = 0

    async def commit(self, changes: Sequence[Change]) -> None:
        """Nothing is durable here, so nothing is kept: old samples must not be pinned."""
        self.commits += len(changes)

    async def load(self) -> Records | None:
        """Nothing was kept."""
        return None

    async def samples(self, rollout_ids: Iterable[RolloutId]) -> Samples:
        """Nothing was kept."""
        return {}

    async def wipe(self) -> None:
        """Nothing was kept."""

    async def close(self) -> None:
        """Nothing to do."""
