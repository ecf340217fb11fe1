"""The orchestrator's background work: build, ship, poll, keep time, sweep. Owned by the app.

Each loop runs until it is cancelled. The world's failures are retried here with a bounded wait;
a step that cannot be built or that the feed will never take stops the run, visibly.
"""

import asyncio
import contextlib
import time
from functools import partial
from typing import Final

import structlog

from services.orchestrator import stepping
from services.orchestrator.building import BuildRules, build, validity_problem
from services.orchestrator.feed_client import FeedBusy, FeedCallFailed, FeedClient, StepRejected
from services.orchestrator.lifecycle import Phase
from services.orchestrator.limits import DISCARD_ATTEMPTS_MAX, RETRY_WAIT_S_MAX
from services.orchestrator.proxy_client import ProxyCallFailed, ProxyClient
from services.orchestrator.rebuilding import rebuild_steps
from services.orchestrator.records import StepState
from services.orchestrator.service import Orchestrator
from services.orchestrator.sweeping import sweep
from sideband.errors import InvalidInput, PayloadError

log = structlog.get_logger(__name__)
RETRY_WAIT_S_MIN: Final = 0.1


async def build_steps(service: Orchestrator) -> None:
    """Build a step whenever one is full."""
    settings = service.settings
    rules = BuildRules(
        run_id=service.book.rules.run_id,
        model=service.model,
        plan=service.plan,
        routing_valid_fraction_min=settings.routing_valid_fraction_min,
        mask_valid_fraction_min=settings.mask_valid_fraction_min,
    )
    await rebuild_steps(service, rules)
    service.to_build.set()  # a draft may be there, or enough for a step
    while True:
        await service.to_build.wait()
        service.to_build.clear()
        while await build_one(service, rules):
            pass


async def build_one(service: Orchestrator, rules: BuildRules) -> bool:
    """Build the next step if it is full; whether it was.

    What it holds is durable before it is built: whatever is decided meanwhile builds on that.
    """
    draft = service.book.draft  # of an earlier process
    if draft is None:
        with service.decision() as change:
            draft = stepping.begin(service.book, change, service.clock_s())
        if draft is None and not change:
            return False
        await service.commit(change)
    if draft is None or service.book.run.is_terminal:
        return False
    problem = validity_problem(draft, rules)
    if problem is None:
        try:
            built = await asyncio.to_thread(build, draft, rules)
        except InvalidInput as exc:
            problem = f"step {draft.step} cannot be built: {exc}"
    if problem is not None:
        await service.stop(problem)
        return False
    with service.decision() as change:
        record = stepping.finish(service.book, change, draft, built, service.clock_s())
    await service.commit(change)
    log.info(
        "step_built",
        step=record.step,
        rollouts=len(record.rollout_ids),
        size_bytes=record.size_bytes,
        micro_batches=record.micro_batches,
        files=len(record.files),
    )
    return True


async def ship_steps(service: Orchestrator, feed: FeedClient) -> None:
    """Hand built steps to the feed, in order, and say when no more will come."""
    has_ended = False
    while True:
        await service.to_ship.wait()
        service.to_ship.clear()
        await _ship_all(service, feed)
        if is_complete(service) and not has_ended:
            has_ended = await _end(service, feed)


async def _ship_all(service: Orchestrator, feed: FeedClient) -> None:
    wait_s = RETRY_WAIT_S_MIN
    while service.book.run.phase is not Phase.STOPPED:
        record = stepping.unsent(service.book)
        if record is None or not record.body:
            return  # nothing to send, or not built again yet
        await service.settled()  # the feed must not have what a crash could change
        try:
            # A feed that was started anew takes any step as its first: what it lost goes first.
            # Only the process that was asked may take it, should the feed start anew in between.
            instance = await poll_feed_once(service, feed)
            if stepping.unsent(service.book) is not record:
                continue
            await feed.put_step(record.step, record.body, feed_instance=instance)
        except StepRejected as exc:
            await service.stop(str(exc))
            return
        except FeedBusy as exc:
            log.debug("feed_busy", step=record.step, retry_after_s=exc.retry_after_s)
            await asyncio.sleep(exc.retry_after_s)
            continue
        except FeedCallFailed as exc:
            service.metrics.delivery_failures_total.inc()
            log.warning("step_delivery_failed", step=record.step, error=str(exc))
            await asyncio.sleep(wait_s)
            wait_s = min(RETRY_WAIT_S_MAX, wait_s * 2)
            continue
        wait_s = RETRY_WAIT_S_MIN
        with service.decision() as change:
            stepping.shipped(service.book, change, record.step)
        await service.commit(change)


def is_complete(service: Orchestrator) -> bool:
    """Whether the feed has all steps that this run will ever have."""
    book = service.book
    if book.run.is_terminal:
        return True
    has_rest = bool(book.held) or stepping.unsent(book) is not None
    return stepping.is_last_step(book) and not has_rest and book.draft is None


async def _end(service: Orchestrator, feed: FeedClient) -> bool:
    try:
        await feed.end()
    except FeedCallFailed as exc:
        log.warning("feed_end_failed", error=str(exc))
        service.metrics.delivery_failures_total.inc()
        await asyncio.sleep(RETRY_WAIT_S_MIN)
        service.to_ship.set()
        return False
    log.info("feed_ended", last_step=service.book.next_step - 1)
    return True


async def poll_feed(service: Orchestrator, feed: FeedClient) -> None:
    """Ask what every rank has committed, and send again what the feed has lost."""
    while True:
        await asyncio.sleep(service.settings.feed_poll_s)
        try:
            await poll_feed_once(service, feed)
        except FeedCallFailed as exc:
            service.metrics.delivery_failures_total.inc()
            log.warning("feed_poll_failed", error=str(exc))


async def poll_feed_once(service: Orchestrator, feed: FeedClient) -> str | None:
    """One poll; which process of the feed holds what was shipped. None: nothing is shipped.

    Raises FeedCallFailed.
    """
    book = service.book
    shipped = {r.step for r in book.open_steps.values() if r.state is StepState.SHIPPED}
    if not shipped:
        return None
    # Held steps are asked for first: one that is committed in between is then in the second
    # answer, and never taken for lost.
    answer = await feed.held_steps()
    held = frozenset(one.step for one in answer.steps)
    acknowledged = await feed.acknowledgements()
    if acknowledged.run_id != book.rules.run_id:
        await service.stop(f"the feed serves run {acknowledged.run_id}")
        return None
    if acknowledged.failed != service.feed_failure:
        service.feed_failure = acknowledged.failed
        log.warning("feed_failure_changed", failure=acknowledged.failed)
    service.room.late_ranks = acknowledged.late_ranks(max(shipped))
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
    return answer.feed_instance


async def poll_proxy(service: Orchestrator, proxy: ProxyClient) -> None:
    """Ask which policy version the engines have applied; pushes are only faster."""
    while True:
        pushes = service.pushes
        try:
            version = await proxy.applied_version()
        except ProxyCallFailed as exc:
            log.warning("proxy_poll_failed", error=str(exc))
        else:
            if pushes == service.pushes:  # else the answer may be older than the push
                await service.set_policy_version(version)
        await asyncio.sleep(service.settings.proxy_poll_s)


async def discard_sessions(service: Orchestrator, proxy: ProxyClient) -> None:
    """Have the proxy delete what ended rollouts wrote. Best effort: the sweep finds the rest."""
    while True:
        session_id = await service.sessions.get()
        for attempt in range(DISCARD_ATTEMPTS_MAX):
            try:
                await proxy.discard_session(session_id)
                break
            except ProxyCallFailed as exc:
                log.warning("session_discard_failed", session_id=session_id, error=str(exc))
                await asyncio.sleep(min(RETRY_WAIT_S_MAX, RETRY_WAIT_S_MIN * 2**attempt))


async def forget_sessions(service: Orchestrator) -> None:
    """Without a proxy there is nobody to tell."""
    while True:
        await service.sessions.get()


async def keep_time(service: Orchestrator) -> None:
    """Deadlines of leases, groups, policies and drains."""
    while True:
        await asyncio.sleep(service.settings.tick_s)
        await service.tick()


async def keep_leading(service: Orchestrator) -> None:
    """Say often enough that this process is alive; the ledger says whether it still leads."""
    while True:
        await asyncio.sleep(service.settings.ledger_lease_s / 3)
        await service.journal.renew()


async def watch_storage(service: Orchestrator) -> None:
    """Measure the payload root. To look at every file takes at most a tenth of the time."""
    files = service.files
    assert files is not None, "there is a root to watch"
    with_used = service.settings.payload_bytes_max is not None
    while True:
        began_s = time.monotonic()
        try:
            usage = await files.call(partial(files.usage, with_used=with_used))
        except (PayloadError, OSError) as exc:
            log.warning("storage_not_measured", error=str(exc))
        else:
            service.room.observe(usage, service.book)
        spent_s = time.monotonic() - began_s
        await asyncio.sleep(max(service.settings.storage_poll_s, 9 * spent_s))


async def sweep_orphans(service: Orchestrator) -> None:
    """Retention rule 3, from time to time and when the run ends."""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(service.settings.sweep_s):
                await service.to_sweep.wait()
        service.to_sweep.clear()
        try:
            plans = await sweep(service, dry_run=False)
        except PayloadError as exc:
            log.warning("sweep_failed", error=str(exc))
            continue
        for plan in plans:
            if plan.files:
                log.info(
                    "version_swept",
                    policy_version=plan.policy_version,
                    files=len(plan.files),
                    size_bytes=plan.size_bytes,
                    kept=plan.kept_count,
                )
