"""Takes the trainer back: looks at what is left of later steps, decides, tells the feed."""

import asyncio
from typing import Final

import structlog

from services.orchestrator import going_back
from services.orchestrator.errors import RETRY_SOON, LedgerUnavailable
from services.orchestrator.feed_client import FeedCallFailed, FeedClient
from services.orchestrator.history import ReturnRecord
from services.orchestrator.ledger import LedgerError
from services.orchestrator.remaining import remains_after
from services.orchestrator.return_errors import NotDurable, StepsMoving
from services.orchestrator.service import Orchestrator

TELLING_S_MAX: Final = 3.0  # of a request: a feed that is away must not hold it up
ATTEMPTS_MAX: Final = 5  # steps may be committed or closed while their files are looked at
KEEPS_NOTHING: Final = "A ledger in memory keeps no samples of steps that were trained."
log = structlog.get_logger(__name__)


async def go_back(service: Orchestrator, *, step: int, lineage: int | None) -> ReturnRecord:
    """The trainer restarts from ``step``. With ``lineage`` (the next one) a repeat changes nothing.

    Raises NotDurable, LineageConflict, StepNotCommitted, RunEnded, RunStopped, StepsMoving,
    LedgerUnavailable.
    """
    book = service.book
    if not service.ledger.is_durable:
        raise NotDurable(KEEPS_NOTHING)
    for _ in range(ATTEMPTS_MAX):
        record = going_back.known(book, step=step, lineage=lineage)
        if record is not None:
            await service.settled()
            return record
        try:
            remains = await remains_after(book, service.ledger, service.files, step)
        except LedgerError as exc:
            service.journal.give_up(str(exc))
            raise LedgerUnavailable("The ledger cannot be read.", headers=RETRY_SOON) from exc
        if remains.steps != going_back.steps_after(book, step):
            continue
        with service.decision() as change:
            if going_back.known(book, step=step, lineage=lineage) is None:
                record = going_back.go_back(
                    book, change, step=step, remains=remains, now_s=service.clock_s()
                )
        if record is None:
            continue  # another request of the same did it
        await service.commit(change)
        say(record)
        return record
    raise StepsMoving("Steps are committed faster than looked at.", headers=RETRY_SOON)


def say(record: ReturnRecord) -> None:
    """Log it, as an error where something does not come again."""
    is_whole = not record.steps_gone and not record.rollouts_dropped
    (log.info if is_whole else log.error)(
        "trainer_went_back",
        lineage=record.lineage,
        start_id=record.start_id,
        step=record.step,
        steps_again=record.steps_again,
        steps_reduced=record.steps_reduced,
        steps_moved=record.steps_moved,
        steps_gone=record.steps_gone,
        rollouts_dropped=record.rollouts_dropped[:100],
        files_missing=len(record.files_missing),
    )


async def tell_feed(service: Orchestrator, feed: FeedClient) -> None:
    """See to it that the feed knows the last time. Raises FeedCallFailed."""
    async with service.feed_telling:
        if service.book.lineage in {0, service.feed_lineage}:
            return
        await service.settled()
        line, last = service.book.line, service.book.next_step - 1
        await feed.go_back(line, last_step=last)
        service.feed_lineage = line[-1][0]


async def tell_feed_within(service: Orchestrator, wait_s: float) -> bool:
    """Try it so long; whether the feed knows. It is told later in any case.

    Raises LedgerUnavailable, NotLeading.
    """
    if service.feed is None:
        return True
    try:
        async with asyncio.timeout(wait_s):
            await tell_feed(service, service.feed)
    except (FeedCallFailed, TimeoutError) as exc:
        log.warning("feed_not_told", lineage=service.book.lineage, error=str(exc))
        return False
    return True
