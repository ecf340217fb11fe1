"""The orchestrator's background work: build, poll, keep time, sweep. Owned by the app.

Each loop runs until it is cancelled. The world's failures are retried here with a bounded wait;
a step that cannot be built stops the run, visibly. ``shipping.py`` speaks to the feed.
"""

import asyncio
import contextlib
import time
from functools import partial
from typing import Final

import structlog

from services.orchestrator import stepping
from services.orchestrator.building import BuildRules, build_or_say
from services.orchestrator.limits import DISCARD_ATTEMPTS_MAX, RETRY_WAIT_S_MAX
from services.orchestrator.proxy_client import ProxyCallFailed, ProxyClient
from services.orchestrator.rebuilding import build_rules, rebuild_steps
from services.orchestrator.service import Orchestrator
from services.orchestrator.sweeping import sweep
from sideband.errors import PayloadError

log = structlog.get_logger(__name__)
RETRY_WAIT_S_MIN: Final = 0.1


async def build_steps(service: Orchestrator) -> None:
    """Build a step whenever one is full."""
    rules = build_rules(service)
    service.to_build.set()  # a draft may be there, steps without a body, or enough for a step
    while True:
        await service.to_build.wait()
        service.to_build.clear()
        await rebuild_steps(service, rules)
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
    built = await asyncio.to_thread(build_or_say, draft, rules)
    if service.book.draft is not draft:
        return True  # the trainer went back meanwhile: it is decided again
    if isinstance(built, str):
        await service.stop(built)
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
                await service.set_policy_version(version, "poll")
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
