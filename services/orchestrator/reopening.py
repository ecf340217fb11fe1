"""Goes on with a run that a fault stopped, once what stops a run is not so any more."""

import asyncio

import structlog

from services.orchestrator.building import build_or_say
from services.orchestrator.ending import overdue_policy
from services.orchestrator.errors import CausePersists
from services.orchestrator.lifecycle import Phase, Run
from services.orchestrator.rebuilding import build_rules, rebuild_next
from services.orchestrator.service import Orchestrator
from services.orchestrator.shipping import refused_by

log = structlog.get_logger(__name__)


async def reopen(service: Orchestrator) -> Run:
    """A stopped run goes on; any other that has not ended stays as it is.

    Whatever may stop a run is tried, not only what did: raises CausePersists for the first that
    would stop it again. Raises RunEnded, LedgerUnavailable too.
    """
    run = service.book.run
    if run.phase is Phase.ENDED:
        problem = run.lease_problem()
        assert problem is not None, "an ended run gives no lease"
        raise problem
    if run.phase is not Phase.STOPPED:
        return run
    async with service.feed_turn:
        cause = await _cause(service)
        if cause is not None:
            detail = f"The run stopped: {run.reason}. What stops it now: {cause}."
            raise CausePersists(detail, reason=run.reason, cause=cause)
        log.warning("run_reopened", stopped_by=run.reason)
        return await service.reopen()


async def _cause(service: Orchestrator) -> str | None:
    if service.has_crashed:
        return "a background task crashed, and nothing is kept: start the process anew"
    cause = overdue_policy(service.book, service.clock_s())
    if cause is not None:
        return cause
    rules, draft = build_rules(service), service.book.draft
    cause = await rebuild_next(service, rules)
    if cause is not None:
        return cause
    if draft is not None:
        built = await asyncio.to_thread(build_or_say, draft, rules)
        if isinstance(built, str):
            return built
    return None if service.feed is None else await refused_by(service.feed, service)
