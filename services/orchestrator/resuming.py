"""Goes on from what the ledger kept: the book, what time took, and what is gone from the disk.

``after_downtime`` is a pure decision on a ``Book``; ``resume`` acts.
"""

from dataclasses import dataclass, replace

import structlog
from msgspec import structs

from services.orchestrator import policies
from services.orchestrator.book import Book
from services.orchestrator.config import OrchestratorSettings
from services.orchestrator.files import Files
from services.orchestrator.history import StartRecord
from services.orchestrator.ledger import Ledger
from services.orchestrator.losses import Report, drop_missing
from services.orchestrator.records import Change, Records
from services.orchestrator.remaining import missing_files
from services.orchestrator.restoring import restore

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where a term begins. ``changes`` are durable already; their effects are not out."""

    book: Book
    changes: tuple[Change, ...]
    report: Report | None  # None: a new run
    delete_files: tuple[str, ...]  # given up earlier, and perhaps not deleted


async def resume(
    settings: OrchestratorSettings,
    ledger: Ledger,
    records: Records | None,
    files: Files | None,
    *,
    now_s: float,
) -> Resumption:
    """The run as ``ledger`` has it in ``records``, or a new one. Raises LedgerError."""
    if records is None:
        book, change = Book(settings.rules()), Change()
        change.start = StartRecord(start_id=settings.start_id, begun_s=now_s)
        if settings.initial_policy_version is not None:
            version = settings.initial_policy_version
            policies.report(book, change, version, source="setting", now_s=now_s)
        return await _begun(ledger, book, change, report=None, delete_files=())
    book, change = restore(records, settings.rules())
    report = Report(downtime_s=max(0.0, now_s - records.saved_s))
    if files is not None:
        report.files_missing = await missing_files(files, book.retention.held_files())
    drop_missing(book, change, report)
    after_downtime(book, change, report.downtime_s)
    if settings.proxy_url is not None:
        book.policy_version = None  # engines may have changed meanwhile: the proxy says
    pending = tuple(file for file, is_pending in records.files.items() if is_pending)
    _say(book, report, pending)
    return await _begun(ledger, book, change, report=report, delete_files=pending)


async def _begun(
    ledger: Ledger,
    book: Book,
    change: Change,
    *,
    report: Report | None,
    delete_files: tuple[str, ...],
) -> Resumption:
    book.seal(change)
    await ledger.commit([change])
    return Resumption(book=book, changes=(change,), report=report, delete_files=delete_files)


def _say(book: Book, report: Report, pending: tuple[str, ...]) -> None:
    log.info(
        "run_resumed",
        downtime_s=round(report.downtime_s, 3),
        next_step=book.next_step,
        leases_open=len(book.open_leases),
        rollouts_held=len(book.held),
        steps_open=sorted(book.open_steps),
        deletions_pending=len(pending),
    )
    if report.files_missing:
        log.error(
            "files_missing_at_resume",
            files=len(report.files_missing),
            first=report.files_missing[0],
            rollouts_dropped=report.rollouts_dropped[:100],
            steps_reduced=report.steps_reduced,
            steps_broken=report.steps_broken,
        )


def after_downtime(book: Book, change: Change, downtime_s: float) -> None:
    """Nobody could renew, deliver or apply while nobody listened: deadlines move by as much.

    Not those of a drain: it ends when it was told to.
    """
    if downtime_s <= 0:
        return
    for lease in list(book.open_leases.values()):
        book.put_lease(change, structs.replace(lease, deadline_s=lease.deadline_s + downtime_s))
    for record in list(book.open_steps.values()):
        if record.acknowledged_s is not None:
            later_s = record.acknowledged_s + downtime_s
            book.put_step(change, replace(record, acknowledged_s=later_s))
    book.groups.wait_longer(downtime_s)
