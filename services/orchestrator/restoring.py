"""A book out of what its ledger recorded. Pure: the same decisions follow as before.

What holds a file follows from the records: open leases, held rollouts, open groups, steps.
"""

from msgspec import structs

from services.orchestrator.advantages import advantaged
from services.orchestrator.book import Book
from services.orchestrator.lifecycle import Phase, Run
from services.orchestrator.records import (
    HELD_STATES,
    Change,
    Draft,
    LeaseState,
    Records,
    Rollout,
    RolloutState,
    StepState,
)
from services.orchestrator.retention import Holder
from services.orchestrator.rules import Rules
from services.orchestrator.stepping import close_done


def restore(records: Records, rules: Rules) -> tuple[Book, Change]:
    """The book as it was after the last durable change, but for bodies of steps.

    The change is empty unless the rules keep less than before: then it says what goes.
    """
    book, change, run = Book(rules), Change(), records.run
    book.run = Run(
        phase=Phase(run.phase),
        reason=run.reason,
        stopped_in=None if run.stopped_in is None else Phase(run.stopped_in),
        leases_until_s=run.leases_until_s,
        drain_until_s=run.drain_until_s,
    )
    book.policy_version, book.policy_applied = run.policy_version, run.policy_applied
    book.policy_before, book.returns = run.policy_before, list(records.returns)
    book.policies.extend(records.policies)
    book.next_step = run.next_step
    book.next_lease_index = run.next_lease_index
    book.next_ready_index = run.next_ready_index
    book.groups.restore(records.groups, records.members)
    acknowledged = [r.step for r in records.steps if r.state is StepState.ACKNOWLEDGED]
    book.retention.restore(
        applied=run.policy_applied, given_up=records.files, acknowledged=acknowledged
    )
    rollouts = [_with_advantages(rollout) for rollout in records.rollouts]
    _steps(book, change, records)
    _rollouts(book, change, rollouts)
    _leases(book, change, records)  # what is forgotten of them depends on the others
    for group in records.groups:
        book.retention.hold(Holder("group", group.group_id), group.files)
    book.draft = _draft(book, rollouts)
    change.leases, change.rollouts, change.steps = [], [], []  # known to the ledger
    book.seal(Change())  # so is this
    change.delete_files += book.retention.close_steps()
    close_done(book, change)
    return book, change


def _with_advantages(rollout: Rollout) -> Rollout:
    """Samples are recorded as they were delivered."""
    return rollout if rollout.advantage is None else advantaged(rollout, rollout.advantage)


def _leases(book: Book, change: Change, records: Records) -> None:
    for lease in records.leases:
        book.put_lease(change, lease)
        if lease.state is LeaseState.OPEN:
            book.retention.hold(Holder("lease", lease.lease_id), lease.files)
    by_index = sorted(book.open_leases.values(), key=lambda lease: lease.index)
    book.open_leases = {lease.lease_id: lease for lease in by_index}


def _rollouts(book: Book, change: Change, rollouts: list[Rollout]) -> None:
    for rollout in rollouts:
        is_held = rollout.state in HELD_STATES
        book.put_rollout(change, rollout if is_held else structs.replace(rollout, samples=()))
        if is_held:
            book.retention.hold(Holder("rollout", rollout.rollout_id), rollout.files)


def _steps(book: Book, change: Change, records: Records) -> None:
    for record in records.steps:
        book.put_step(change, record)
        if record.state is not StepState.CLOSED:
            book.retention.ship(record.step, record.files)


def _draft(book: Book, rollouts: list[Rollout]) -> Draft | None:
    step = book.next_step - 1
    packed = [r for r in rollouts if r.state is RolloutState.PACKED and r.step == step]
    if not packed or step in book.steps:
        return None
    draft = Draft(step=step, rollouts=tuple(packed))
    book.retention.ship(step, draft.files)
    return draft
