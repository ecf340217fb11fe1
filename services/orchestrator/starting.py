"""Begins a term: goes on from the ledger, and takes the trainer back where the settings say so."""

from dataclasses import replace

from services.kit.problems import Problem
from services.orchestrator import going_back
from services.orchestrator.beginning import StartRefused
from services.orchestrator.config import OrchestratorSettings
from services.orchestrator.files import Files
from services.orchestrator.ledger import Ledger
from services.orchestrator.records import Change, Records
from services.orchestrator.remaining import remains_after
from services.orchestrator.resuming import Resumption, resume
from services.orchestrator.return_errors import NotDurable
from services.orchestrator.returning import KEEPS_NOTHING, say


async def begin_term(
    settings: OrchestratorSettings,
    ledger: Ledger,
    records: Records | None,
    files: Files | None,
    *,
    now_s: float,
) -> Resumption:
    """The run as ``ledger`` has it in ``records``, or a new one. Raises StartRefused, LedgerError.

    What has changed is durable then.
    """
    resumption = await resume(settings, ledger, records, files, now_s=now_s)
    latest = None if records is None else records.latest_start
    return await _go_back(settings, ledger, files, resumption, latest=latest, now_s=now_s)


async def _go_back(
    settings: OrchestratorSettings,
    ledger: Ledger,
    files: Files | None,
    resumption: Resumption,
    *,
    latest: str | None,
    now_s: float,
) -> Resumption:
    """The trainer restarts from the step of the settings, if they name one: once for each start.

    What is done is durable then. Raises StartRefused, LedgerError.
    """
    step, start_id, book = settings.resume_from_step, settings.start_id, resumption.book
    if step is None or start_id is None:
        return resumption
    try:
        if not ledger.is_durable:
            raise NotDurable(KEEPS_NOTHING)
        done = going_back.known_of_start(book, step=step, start_id=start_id, latest_start=latest)
        if done is not None:
            return resumption
    except Problem as problem:
        reason = problem.detail
        raise StartRefused(step=step, start_id=start_id, reason=reason) from problem
    change, remains = Change(), await remains_after(book, ledger, files, step)
    record = going_back.go_back(
        book, change, step=step, remains=remains, now_s=now_s, start_id=start_id
    )
    book.seal(change)
    await ledger.commit([change])
    say(record)
    return replace(resumption, changes=(*resumption.changes, change))
