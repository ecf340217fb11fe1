"""What goes to the trainer feed and what comes back. Owned by the app.

The world's failures are retried with a bounded wait; a step that the feed will never take stops the
run, visibly.
"""

import asyncio
from typing import Final

import structlog

from services.orchestrator import stepping
from services.orchestrator.feed_client import (
    FeedBehind,
    FeedBusy,
    FeedCallFailed,
    FeedClient,
    StepRejected,
)
from services.orchestrator.lifecycle import Phase
from services.orchestrator.limits import RETRY_WAIT_S_MAX
from services.orchestrator.records import StepState
from services.orchestrator.returning import tell_feed
from services.orchestrator.service import Orchestrator

log = structlog.get_logger(__name__)
RETRY_WAIT_S_MIN: Final = 0.1


async def ship_steps(service: Orchestrator, feed: FeedClient) -> None:
    """Hand built steps to the feed, in order, and say when no more will come."""
    while True:
        await service.to_ship.wait()
        service.to_ship.clear()
        async with service.feed_turn:
            await _ship_all(service, feed)
            if is_complete(service) and service.ended_feed is None:
                await _end(service, feed)


async def _ship_all(service: Orchestrator, feed: FeedClient) -> None:
    wait_s = RETRY_WAIT_S_MIN
    while service.book.run.phase is not Phase.STOPPED:
        try:
            if not await _hand_over(service, feed):
                return
        except StepRejected as exc:
            await service.stop(str(exc))
            return
        except FeedBusy as exc:
            log.debug("feed_busy", error=str(exc), retry_after_s=exc.retry_after_s)
            await asyncio.sleep(exc.retry_after_s)
            continue
        except FeedCallFailed as exc:
            service.metrics.delivery_failures_total.inc()
            log.warning("step_delivery_failed", error=str(exc))
            await asyncio.sleep(wait_s)
            wait_s = min(RETRY_WAIT_S_MAX, wait_s * 2)
            continue
        wait_s = RETRY_WAIT_S_MIN


async def _hand_over(service: Orchestrator, feed: FeedClient) -> bool:
    """Hand the next step over; False when there is none, or it is not built again yet.

    Raises FeedCallFailed, StepRejected.
    """
    await tell_feed(service, feed)
    record, lineage = stepping.unsent(service.book), service.book.lineage
    if record is None or not record.body:
        return False
    await service.settled()  # the feed must not have what a crash could change
    # A feed that was started anew takes any step as its first: what it lost goes first.
    # Only the process that was asked may take it, should the feed start anew in between.
    instance = await poll_feed_once(service, feed)
    if stepping.unsent(service.book) is not record:
        return True
    await feed.put_step(record.step, record.body, feed_instance=instance)
    if service.book.lineage == lineage:  # else the trainer went back meanwhile: it is sent again
        with service.decision() as change:
            stepping.shipped(service.book, change, record.step)
        await service.commit(change)
    return True


async def refused_by(feed: FeedClient, service: Orchestrator) -> str | None:
    """Why the feed does not take what comes next; None when it does, or may later."""
    try:
        served = (await feed.acknowledgements()).run_id
        if served != service.book.rules.run_id:
            return f"the feed serves run {served}"
        service.ended_feed = None  # a stopped run has told it the end
        await feed.reopen()
        await _hand_over(service, feed)
    except StepRejected as exc:
        service.to_ship.set()  # it is told the end again
        return str(exc)
    except FeedBusy:
        return None
    except FeedCallFailed as exc:
        return f"the feed cannot be asked: {exc}"
    return None


def is_complete(service: Orchestrator) -> bool:
    """Whether the feed has all steps that this run will ever have."""
    book = service.book
    if book.run.is_terminal:
        return True
    has_rest = bool(book.held) or stepping.unsent(book) is not None
    return stepping.is_last_step(book) and not has_rest and book.draft is None


async def _end(service: Orchestrator, feed: FeedClient) -> None:
    """Only the process that holds what was shipped, and is of the run's lineage, is told."""
    try:
        await tell_feed(service, feed)
        instance = await _ask(service, feed)
        if instance is None or not is_complete(service):
            return  # it serves another run, or has lost a step: that comes first
        await feed.end(feed_instance=instance)
    except FeedCallFailed as exc:
        log.warning("feed_end_failed", error=str(exc))
        service.metrics.delivery_failures_total.inc()
        await asyncio.sleep(RETRY_WAIT_S_MIN)
        service.to_ship.set()
        return
    service.ended_feed = instance
    log.info("feed_ended", last_step=service.book.next_step - 1)


async def poll_feed(service: Orchestrator, feed: FeedClient) -> None:
    """Ask what every rank has committed, and send again what the feed has lost."""
    while True:
        await asyncio.sleep(service.settings.feed_poll_s)
        try:
            await poll_feed_once(service, feed)
        except FeedBehind:
            service.to_ship.set()
        except FeedCallFailed as exc:
            if service.book.run.is_terminal:
                continue  # it may be gone for good
            service.metrics.delivery_failures_total.inc()
            log.warning("feed_poll_failed", error=str(exc))


async def poll_feed_once(service: Orchestrator, feed: FeedClient) -> str | None:
    """One poll; which process of the feed holds what was shipped. None: it need not be known.

    Raises FeedCallFailed; FeedBehind when its answers are of before the trainer went back.
    """
    is_shipped = any(r.state is StepState.SHIPPED for r in service.book.open_steps.values())
    if not is_shipped and not service.book.lineage and service.ended_feed is None:
        return None
    return await _ask(service, feed)


async def _ask(service: Orchestrator, feed: FeedClient) -> str | None:
    """As ``poll_feed_once``. None: the feed serves another run."""
    book = service.book
    shipped = {r.step for r in book.open_steps.values() if r.state is StepState.SHIPPED}
    # Held steps are asked for first: one that is committed in between is then in the second
    # answer, and never taken for lost.
    answer = await feed.held_steps()
    held = frozenset(one.step for one in answer.steps)
    acknowledged = await feed.acknowledgements()
    for lineage in (answer.lineage, acknowledged.lineage):
        if lineage != book.lineage:
            service.feed_lineage = lineage
            raise FeedBehind(lineage, expected=book.lineage)
    if acknowledged.run_id != book.rules.run_id:
        await service.stop(f"the feed serves run {acknowledged.run_id}")
        return None
    if acknowledged.failed != service.feed_failure:
        service.feed_failure = acknowledged.failed
        log.warning("feed_failure_changed", failure=acknowledged.failed)
    service.room.late_ranks = acknowledged.late_ranks(max(shipped, default=0))
    if acknowledged.committed_step is not None:
        await service.acknowledge(acknowledged.committed_step)
    # Steps shipped since the first question are not among those that may be lost.
    later = set(book.open_steps) - shipped
    with service.decision() as change:
        again = stepping.lost(book, change, held | later)
    await service.commit(change)
    if again:
        service.metrics.steps_resent_total.inc(len(again))
        log.warning("feed_lost_steps", steps=again)
    if service.ended_feed not in {None, answer.feed_instance}:
        service.ended_feed = None  # another process, or lineage: it does not know of the end
        service.to_ship.set()
    return answer.feed_instance
