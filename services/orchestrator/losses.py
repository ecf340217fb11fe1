"""What a resume, or a trainer that goes back, found gone. Pure decisions on a ``Book``.

Retention rule 5: restored work that points at files which are gone is dropped, and said.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from msgspec import structs

from services.orchestrator.book import Book
from services.orchestrator.records import (
    Change,
    Draft,
    DropReason,
    Rollout,
    StepRecord,
    StepState,
)
from sideband.ids import RolloutId


@dataclass(slots=True, kw_only=True)
class Report:
    """What a resume found gone, in names: nothing is dropped that is not listed here."""

    downtime_s: float = 0.0
    files_missing: list[str] = field(default_factory=list)
    rollouts_dropped: list[RolloutId] = field(default_factory=list)
    steps_reduced: list[int] = field(default_factory=list)  # not shipped yet: built without these
    steps_broken: list[int] = field(default_factory=list)  # shipped: their ranks may fail to read


def drop_missing(book: Book, change: Change, report: Report) -> None:
    """Drop what needs files of ``report.files_missing``, and name it there.

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
