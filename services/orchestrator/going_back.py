"""The trainer goes back to an earlier checkpoint, of step s. Pure decisions on a ``Book``.

No step after s is committed or applied any more. Its steps are handed over again, in order and byte
by byte, as far as their samples and files are still there; what is gone is dropped, and said (rule
5). A step of which nothing is left is a *gap*: what lies behind the first one is packed again, in
the order of before, from its number on, so that the trainer misses no number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from msgspec import structs

from services.orchestrator.advantages import advantaged
from services.orchestrator.book import Book
from services.orchestrator.history import ReturnRecord
from services.orchestrator.losses import Report, drop_missing
from services.orchestrator.records import (
    Change,
    DropReason,
    RolloutState,
    StepRecord,
    StepState,
)
from services.orchestrator.retention import Holder
from services.orchestrator.return_errors import LineageConflict, StepNotCommitted
from sideband.batch.types import Sample
from sideband.feed.ancestry import line_after
from sideband.ids import RolloutId


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """What is left of the steps that are to come again: of each rollout with samples, its files.

    ``steps`` are those that were looked at; ``samples`` are of the steps behind the gap.
    """

    steps: Mapping[int, tuple[RolloutId, ...]]
    files: Mapping[RolloutId, frozenset[str]]
    files_missing: frozenset[str]
    samples: Mapping[RolloutId, tuple[Sample, ...]] = field(default_factory=dict)

    def is_left(self, rollout_id: RolloutId) -> bool:
        """Whether all of the rollout can be read again."""
        files = self.files.get(rollout_id)
        return files is not None and not files & self.files_missing


def known(book: Book, *, step: int, lineage: int | None) -> ReturnRecord | None:
    """The record of this very request, if it was carried out; None when it may be.

    Raises LineageConflict, StepNotCommitted, RunEnded, RunStopped.
    """
    latest = book.returns[-1] if book.returns else None
    if latest is not None and (latest.lineage, latest.step) == (lineage, step):
        return latest
    if lineage is not None and lineage != book.lineage + 1:
        raise LineageConflict(
            f"The run's lineage is {book.lineage}: the next is {book.lineage + 1}.",
            lineage=book.lineage,
        )
    problem = book.run.lease_problem()
    if book.run.is_terminal and problem is not None:
        raise problem
    last = committed_step(book)
    if not book.rules.first_step - 1 <= step <= last:
        # Its ranks may have committed it while nobody listened: they say so when they join.
        is_sent = last < step <= last_built(book)
        hint = " A trainer that holds it goes on without going back." if is_sent else ""
        raise StepNotCommitted(
            f"Step {step} is none that every rank has committed: the last is {last}, the first of "
            f"the run {book.rules.first_step}.{hint}",
            committed_step=last,
        )
    return None


def known_of_start(
    book: Book, *, step: int, start_id: str, latest_start: str | None = None
) -> ReturnRecord | None:
    """The record of this very start, if it went back; None when it may.

    Raises LineageConflict when it went back to another step or ``latest_start``, another one, has
    come since, and what ``known`` raises.
    """
    for record in book.returns:
        if record.start_id == start_id and record.step == step:
            return record
        if record.start_id == start_id:
            raise LineageConflict(
                f"It went back to step {record.step} before: another start needs another id.",
                lineage=record.lineage,
            )
    if latest_start not in {None, start_id}:
        raise LineageConflict(
            f"Start {latest_start} has come since: it would void what that one trains.",
            lineage=book.lineage,
        )
    return known(book, step=step, lineage=None)


def committed_step(book: Book) -> int:
    """The last step that every global rank has committed."""
    unfinished = [r.step for r in book.open_steps.values() if r.acknowledged_s is None]
    return min(unfinished, default=last_built(book) + 1) - 1


def last_built(book: Book) -> int:
    """The last step that has a record; one that is being built has none."""
    return book.next_step - 1 - (book.draft is not None)


def steps_after(book: Book, step: int) -> dict[int, tuple[RolloutId, ...]]:
    """The rollouts of each step after ``step`` that is not closed, ascending."""
    return {n: book.open_steps[n].rollout_ids for n in sorted(book.open_steps) if n > step}


def first_gap(book: Book, step: int, remains: Remains) -> int:
    """The first step after ``step`` that cannot come again under its number; else the next new."""
    for number in range(step + 1, last_built(book) + 1):
        names = remains.steps.get(number, ())
        has_samples = all(name in remains.files for name in names)
        if not has_samples or not any(remains.is_left(name) for name in names):
            return number
    return last_built(book) + 1


def go_back(
    book: Book,
    change: Change,
    *,
    step: int,
    remains: Remains,
    now_s: float,
    start_id: str | None = None,
) -> ReturnRecord:
    """Carry it out. ``remains`` are of the book as it is now."""
    assert remains.steps == steps_after(book, step), "looked at what is there"
    last, gap = last_built(book), first_gap(book, step, remains)
    gone = [number for number in range(step + 1, last + 1) if number not in remains.steps]
    report = Report(files_missing=sorted(remains.files_missing))
    for number in gone:
        if number in book.steps:
            report.rollouts_dropped += book.steps[number].rollout_ids
            book.forget_step(change, number)
    book.retention.go_back(step)
    for number in remains.steps:
        if number < gap:
            _reopen(book, change, book.steps[number], remains)
        else:
            _unpack(book, change, book.steps[number], remains, report)
    if gap <= last:
        _unpack_draft(book, change)
        book.next_step = gap
    drop_missing(book, change, report)
    behind = {n: names for n, names in remains.steps.items() if n >= gap}
    empty = [n for n, names in behind.items() if set(names) <= set(report.rollouts_dropped)]
    _void_policies(book, step)
    record = ReturnRecord(
        lineage=book.lineage + 1,
        step=step,
        returned_s=now_s,
        last_step=last,
        steps_again=tuple(n for n in remains.steps if n < gap and n not in report.steps_reduced),
        steps_reduced=tuple(n for n in report.steps_reduced if n < gap),
        steps_moved=tuple(n for n in behind if n not in empty),
        steps_gone=tuple(sorted([*gone, *empty])),
        rollouts_dropped=tuple(report.rollouts_dropped),
        files_missing=tuple(report.files_missing),
        start_id=start_id,
        line=line_after(book.line, lineage=book.lineage + 1, step=step),
    )
    book.returns.append(record)
    change.returns.append(record)
    _forget_returns(book, change)
    return record


def _forget_returns(book: Book, change: Change) -> None:
    """The oldest beyond the bound; never the last that was for a start, which may come again."""
    starts = [record for record in book.returns if record.start_id is not None]
    while len(book.returns) > book.rules.history_max + len(starts[-1:]):
        oldest = next(record for record in book.returns if record not in starts[-1:])
        book.returns.remove(oldest)
        change.returns_forgotten.append(oldest.lineage)


def _reopen(book: Book, change: Change, record: StepRecord, remains: Remains) -> None:
    for name in record.rollout_ids:
        packed = structs.replace(
            book.rollouts[name], state=RolloutState.PACKED, files=remains.files[name]
        )
        book.put_rollout(change, packed)
    # All that its rollouts name: a resume took from the record what it found gone. And what it
    # holds of others: those that were dropped when it came again before.
    files = record.files.union(*(remains.files[name] for name in record.rollout_ids))
    again = replace(record, files=files, state=StepState.BUILT, acknowledged_s=None)
    book.put_step(change, again)


def _unpack(
    book: Book, change: Change, record: StepRecord, remains: Remains, report: Report
) -> None:
    """The rollouts of a step are ready for another one, in their order of before."""
    for name in record.rollout_ids:
        rollout = book.rollouts[name]
        if name not in remains.samples:
            book.drop(change, rollout, DropReason.FILES_GONE, detail="its samples are gone")
            report.rollouts_dropped.append(name)
            continue
        ready = structs.replace(
            rollout,
            state=RolloutState.READY,
            step=None,
            files=remains.files[name],
            samples=remains.samples[name],
        )
        refused = book.retention.hold(Holder("rollout", name), ready.files)
        assert remains.files_missing.issuperset(refused), "its step holds what is there"
        own = ready.advantage
        book.put_rollout(change, ready if own is None else advantaged(ready, own))
    change.delete_files += book.retention.undo(record.step)
    book.forget_step(change, record.step)


def _unpack_draft(book: Book, change: Change) -> None:
    """So are those of a step that is decided and not built."""
    if book.draft is None:
        return
    for rollout in book.draft.rollouts:
        book.retention.hold(Holder("rollout", rollout.rollout_id), rollout.files)
        ready = structs.replace(rollout, state=RolloutState.READY, step=None)
        book.put_rollout(change, ready)
    change.delete_files += book.retention.undo(book.draft.step)
    book.draft = None


def _void_policies(book: Book, step: int) -> None:
    """Versions after v(step) are not of this lineage: the engines must first show an older one."""
    before = book.policy_applied if book.policy_version is None else book.policy_version
    if before > step:
        book.policy_before, book.policy_version = before, None
    book.policy_applied = min(book.policy_applied, step)
