"""Steps: what the next one holds, and what becomes of it. Pure decisions on a ``Book``."""

from dataclasses import dataclass, replace

from msgspec import structs

from services.orchestrator.book import Book
from services.orchestrator.lifecycle import Phase
from services.orchestrator.membership import Candidate, choose
from services.orchestrator.records import (
    Change,
    Draft,
    Rollout,
    RolloutState,
    StepRecord,
    StepState,
)
from services.orchestrator.retention import Holder


def begin(book: Book, change: Change, now_s: float) -> Draft | None:
    """Decide the next step if it is full (or the last one): its rollouts are packed now.

    The step's files are held by the step from here on, and what is too old for the step after it
    is dropped. The draft stays with the book until it is built.
    """
    rules = book.rules
    is_short = rules.step_size.tokens is None and len(book.held) < rules.step_size.rollouts
    if is_short and book.run.phase is not Phase.DRAINING:
        return None  # asked after every delivery: this must cost nothing
    unfinished = sum(
        step.state in {StepState.BUILT, StepState.SHIPPED} for step in book.open_steps.values()
    )
    if book.run.is_terminal or book.draft is not None or unfinished >= rules.steps_ahead_max:
        return None
    ready = [r for r in book.held.values() if r.state is RolloutState.READY]
    chosen = choose(
        [_candidate(rollout, rules.is_deterministic) for rollout in ready],
        size=rules.step_size,
        stop_before=_first_unresolved(book) if rules.is_deterministic else None,
        is_last=rules.ship_last_partial_step and is_last_step(book),
    )
    if not chosen:
        return None
    draft = Draft(step=book.next_step, rollouts=tuple(book.held[name] for name in chosen))
    book.retention.ship(draft.step, draft.files)
    for rollout in draft.rollouts:
        packed = structs.replace(rollout, state=RolloutState.PACKED, step=draft.step, samples=())
        book.put_rollout(change, packed)
        freed = book.retention.release(Holder("rollout", rollout.rollout_id))
        assert not freed, "the step holds what its rollouts held"
    book.next_step += 1
    book.draft = draft
    book.drop_stale(change, now_s=now_s)
    return draft


def _candidate(rollout: Rollout, is_deterministic: bool) -> Candidate:
    order = rollout.index if is_deterministic else rollout.ready_index
    assert order is not None, "a ready rollout has a place in the order of arrival"
    return Candidate(rollout_id=rollout.rollout_id, order=order, tokens=rollout.tally.tokens)


def _first_unresolved(book: Book) -> int | None:
    """The dispatch index of the first rollout that runs or waits for its group."""
    waiting = [r.index for r in book.held.values() if r.state is RolloutState.WAITING]
    return min([*(lease.index for lease in book.open_leases.values()), *waiting], default=None)


def is_last_step(book: Book) -> bool:
    """Whether nothing more can become ready: the run drains, no lease is open, no group waits."""
    if book.run.phase is not Phase.DRAINING or book.open_leases:
        return False
    return not any(r.state is RolloutState.WAITING for r in book.held.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What building a draft gave."""

    body: bytes
    digest: str
    micro_batches: int


def finish(book: Book, change: Change, draft: Draft, built: Built, now_s: float) -> StepRecord:
    """The draft is built and may go to the feed."""
    assert book.draft is draft, "what was decided last is built"
    book.draft = None
    record = StepRecord(
        step=draft.step,
        state=StepState.BUILT,
        rollout_ids=tuple(rollout.rollout_id for rollout in draft.rollouts),
        files=draft.files,
        digest=built.digest,
        body=built.body,
        size_bytes=len(built.body),
        micro_batches=built.micro_batches,
        tally=draft.tally,
        built_s=now_s,
    )
    book.put_step(change, record)
    return record


def shipped(book: Book, change: Change, step: int) -> None:
    """The feed has taken ``step``."""
    if book.steps[step].state is StepState.BUILT:
        book.put_step(change, replace(book.steps[step], state=StepState.SHIPPED))


def lost(book: Book, change: Change, held_by_feed: frozenset[int]) -> list[int]:
    """Shipped steps that the feed no longer has: to be sent again, in order."""
    again = [
        record.step
        for record in book.open_steps.values()
        if record.state is StepState.SHIPPED and record.step not in held_by_feed
    ]
    for step in again:
        book.put_step(change, replace(book.steps[step], state=StepState.BUILT))
    return sorted(again)


def acknowledge(book: Book, change: Change, committed_step: int, now_s: float) -> None:
    """Every global rank has committed every step up to ``committed_step``."""
    for step in sorted(book.open_steps):
        record = book.open_steps[step]
        if step > committed_step or record.state not in {StepState.BUILT, StepState.SHIPPED}:
            continue
        done = replace(record, state=StepState.ACKNOWLEDGED, acknowledged_s=now_s, body=b"")
        book.put_step(change, done)
        for rollout_id in record.rollout_ids:
            rollout = book.rollouts.get(rollout_id)
            if rollout is not None:
                trained = structs.replace(rollout, state=RolloutState.TRAINED, files=frozenset())
                book.put_rollout(change, trained)
        change.delete_files += book.retention.acknowledge(step)
    close_done(book, change)


def apply_policy(
    book: Book, change: Change, policy_version: int, *, lineage: int | None = None
) -> None:
    """Every serving engine has applied ``policy_version``. It may fall: an engine went back.

    After the trainer went back, versions count again once the engines show an older one than
    before, or one that is said to be of the run's ``lineage``: until then they serve what the
    trainer has left.
    """
    if book.policy_before is not None:
        if policy_version >= book.policy_before and lineage != book.lineage:
            return
        book.policy_before = None
    if policy_version == book.policy_version:
        return
    book.policy_version = change.policy_version = policy_version
    book.policy_applied = max(book.policy_applied, policy_version)
    change.delete_files += book.retention.apply(policy_version)
    close_done(book, change)


def close_done(book: Book, change: Change) -> None:
    """Close the steps whose files retention has let go of."""
    for record in list(book.open_steps.values()):
        is_done = record.state is StepState.ACKNOWLEDGED
        if is_done and not book.retention.is_open(record.step):
            book.put_step(change, replace(record, state=StepState.CLOSED, files=frozenset()))


def unsent(book: Book) -> StepRecord | None:
    """The first step that the feed must still take."""
    built = [r for r in book.open_steps.values() if r.state is StepState.BUILT]
    return min(built, key=lambda record: record.step, default=None)
