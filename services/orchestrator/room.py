"""Whether the payload root has room for new work, and the words for when it has not."""

import structlog

from services.orchestrator.book import Book
from services.orchestrator.ending import waiting_for
from services.orchestrator.errors import StorageFull
from services.orchestrator.metrics import Metrics
from services.orchestrator.quota import Quota, Usage

log = structlog.get_logger(__name__)
RETRY_LATER = {"Retry-After": "5"}
RANKS_NAMED_MAX = 8


class Room:
    """The quota of one run. ``late_ranks`` are those that the feed says are behind."""

    def __init__(self, quota: Quota, metrics: Metrics) -> None:
        self.quota, self._metrics = quota, metrics
        self.late_ranks: list[int] = []

    def observe(self, usage: Usage, book: Book) -> None:
        """Take a measurement."""
        has_turned = self.quota.observe(usage)
        self._metrics.storage_full.set(self.quota.is_full)
        self._metrics.storage_free_bytes.set(usage.free_bytes)
        if usage.used_bytes is not None:
            self._metrics.storage_used_bytes.set(usage.used_bytes)
        if has_turned and self.quota.is_full:
            log.error("storage_full", usage=str(self.quota), waiting_for=self._waiting_for(book))
        elif has_turned:
            log.info("storage_has_room", usage=str(self.quota))

    def admit_lease(self, book: Book) -> None:
        """A new rollout writes files. Raises StorageFull."""
        if self.quota.is_full:
            self._refuse(book)

    def admit_delivery(self, book: Book) -> None:
        """What is delivered has written its files: it waits only while others will free space.

        When nothing on its way to the ranks will, this rollout may fill the step that does.
        Raises StorageFull.
        """
        frees = book.draft is not None or any(
            not book.retention.is_done(step) for step in book.open_steps
        )
        if self.quota.is_full and frees:
            self._refuse(book)

    def _refuse(self, book: Book) -> None:
        self._metrics.storage_refusals_total.inc()
        raise StorageFull(
            f"The payload root is full: {self.quota}. Waiting for: {self._waiting_for(book)}.",
            headers=RETRY_LATER,
            late_ranks=self.late_ranks[:RANKS_NAMED_MAX],
        )

    def _waiting_for(self, book: Book) -> str:
        """What would free space; the ranks that hold it up are named."""
        ranks = ", ".join(str(rank) for rank in self.late_ranks[:RANKS_NAMED_MAX])
        return waiting_for(book) + (f" (rank {ranks})" if ranks else "")
