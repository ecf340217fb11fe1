"""Goes on from what the ledger kept: the book, what time took, and what is gone from the disk.

``drop_missing`` and ``after_downtime`` are pure decisions on a ``Book``; ``resume`` acts.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import structlog
from msgspec import structs

from services.orchestrator import policies
from services.orchestrator.book import Book
from services.orchestrator.config import OrchestratorSettings
from services.orchestrator.files import Files
from services.orchestrator.history import StartRecord
from services.orchestrator.ledger import Ledger
from services.orchestrator.limits import FILES_PER_STAT
from services.orchestrator.records import (
    Change,
    Draft,
    DropReason,
    Records,
    Rollout,
    StepRecord,
    StepState,
)
from services.orchestrator.restoring import restore
from sideband.ids import RolloutId

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Report:
    """What a resume found gone, in names: nothing is dropped that is not listed here."""

    downtime_s: float = 0.0
    files_missing: list[str] = field(default_factory=list)
    rollouts_dropped: list[RolloutId] = field(default_factory=list)
    steps_reduced: list[int] = field(default_factory=list)  # not shipped yet: built without these
    steps_broken: list[int] = field(default_factory=list)  # shipped: their ranks may fail to read


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where a term begins. ``change`` is durable already; its effects are not out."""

    book: Book
    change: Change
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
        return await _committed(
            ledger, Resumption(book=book, change=change, report=None, delete_files=())
        )
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
    return await _committed(
        ledger, Resumption(book=book, change=change, report=report, delete_files=pending)
    )


async def _committed(ledger: Ledger, resumption: Resumption) -> Resumption:
    resumption.book.seal(resumption.change)
    await ledger.commit([resumption.change])
    return resumption


async def missing_files(files: Files, names: list[str]) -> list[str]:
    """Those of ``names`` that are not on the disk, asked for by many threads."""
    pieces = [names[i : i + FILES_PER_STAT] for i in range(0, len(names), FILES_PER_STAT)]
    found = await asyncio.gather(*(files.call(files.missing, piece) for piece in pieces))
    return [name for piece in found for name in piece]


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


def drop_missing(book: Book, change: Change, report: Report) -> None:
    """Retention rule 5: restored work that points at files which are gone is dropped, and said.

    A step that was shipped is not changed any more: ranks may have read the files, or will say
    that they cannot.
    """
    missing = frozenset(report.files_missing)
    if not missing:
        return
    needed_by_ranks: set[str] = set()
    for record in list(book.open_steps.values()):
        if record.state is StepState.SHIPPED and record.files & missing:
            report.steps_broken.append(record.step)
            needed_by_ranks |= record.files
    lost = missing - needed_by_ranks
    change.delete_files += book.retention.lose(lost)
    for lease in [lease for lease in book.open_leases.values() if lease.files & lost]:
        book.put_lease(change, structs.replace(lease, files=lease.files - lost))
    for rollout in [rollout for rollout in book.held.values() if rollout.files & lost]:
        _drop(book, change, rollout, report, lost)
    for record in sorted(book.open_steps.values(), key=lambda record: record.step):
        if record.files & lost:
            _reduce_step(book, change, record, report, lost)
    if book.draft is not None and book.draft.files & lost:
        book.draft = _reduced_draft(book, change, book.draft, report, lost)


def _drop(
    book: Book, change: Change, rollout: Rollout, report: Report, lost: Iterable[str]
) -> None:
    gone = sorted(rollout.files.intersection(lost))
    book.drop(change, rollout, DropReason.FILES_GONE, detail=f"gone at the resume: {gone[0]}")
    report.rollouts_dropped.append(rollout.rollout_id)


def _reduce_step(
    book: Book, change: Change, record: StepRecord, report: Report, lost: frozenset[str]
) -> None:
    kept = []
    if record.state is StepState.BUILT:
        report.steps_reduced.append(record.step)
        for rollout_id in record.rollout_ids:
            rollout = book.rollouts[rollout_id]
            if rollout.files & lost:
                _drop(book, change, rollout, report, lost)
            else:
                kept.append(rollout_id)
        # What was built of them all must not be sent: it is built again.
        record = replace(record, rollout_ids=tuple(kept), digest="", body=b"")
    book.put_step(change, replace(record, files=record.files - lost))


def _reduced_draft(
    book: Book, change: Change, draft: Draft, report: Report, lost: frozenset[str]
) -> Draft | None:
    kept = tuple(rollout for rollout in draft.rollouts if not rollout.files & lost)
    for rollout in draft.rollouts:
        if rollout.files & lost:
            _drop(book, change, rollout, report, lost)
    report.steps_reduced.append(draft.step)
    if kept:
        return replace(draft, rollouts=kept)
    book.retention.unship(draft.step)
    book.next_step = draft.step  # nothing was built of it: its number is free
    return None


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
