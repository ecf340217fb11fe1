"""How a run ends: drained, out of time, or stopped by a fault. Pure decisions on a ``Book``.

Every way ends: a drain by its second deadline, a policy that never comes by its own. What a rank
may still have to read is kept in any case; the reason says so.
"""

from services.orchestrator.book import Book
from services.orchestrator.leasing import expire
from services.orchestrator.lifecycle import Phase, Run
from services.orchestrator.records import Change, DropReason, LeaseState, StepState
from services.orchestrator.stepping import close_done, is_last_step


def tick(book: Book, change: Change, now_s: float) -> None:
    """Everything that time alone decides; to be called about once a second."""
    expire(book, change, now_s)
    late = overdue_policy(book, now_s)
    if late is not None:
        set_run(book, change, book.run.stopped(late), now_s)
    if book.run.phase is Phase.DRAINING:
        _drain(book, change, now_s)


def set_run(book: Book, change: Change, run: Run, now_s: float) -> None:
    """Enter a phase. A terminal one cancels every open lease; ``ended`` drops what is held."""
    if run == book.run:
        return
    if run.phase is not book.run.phase:
        change.phase = run.phase.value
    book.run = run
    if not run.is_terminal:
        return
    for lease in list(book.open_leases.values()):
        book.end_lease(change, lease, LeaseState.CANCELLED, reason=run.phase.value, now_s=now_s)
    if run.phase is Phase.ENDED:
        for rollout in list(book.held.values()):
            book.drop(change, rollout, DropReason.RUN_ENDED, detail=run.reason)
        change.delete_files += book.retention.keep_no_steps()  # nobody goes back in an ended run
        close_done(book, change)


def overdue_policy(book: Book, now_s: float) -> str | None:
    """Which policy should have been applied by now; None when none is late."""
    for record in sorted(book.open_steps.values(), key=lambda record: record.step):
        if record.acknowledged_s is None or book.retention.is_done(record.step):
            continue
        if now_s - record.acknowledged_s < book.rules.policy_timeout_s:
            return None
        return (
            f"v{record.step} was not applied within {book.rules.policy_timeout_s:.0f} s after "
            f"every rank committed step {record.step}"
        )
    return None


def _drain(book: Book, change: Change, now_s: float) -> None:
    run = book.run
    assert run.leases_until_s is not None
    assert run.drain_until_s is not None
    if now_s >= run.leases_until_s:
        for lease in list(book.open_leases.values()):
            book.end_lease(change, lease, LeaseState.CANCELLED, reason="drain", now_s=now_s)
    if not book.open_leases:
        for group_id in book.groups.overdue(now_s=now_s, timeout_s=0.0):
            book.settle_group(change, book.groups.close(group_id))
    if is_last_step(book) and not book.rules.ship_last_partial_step:
        _drop_rest(book, change)
    if now_s >= run.drain_until_s:
        set_run(book, change, run.ended(f"drain deadline: {waiting_for(book)}"), now_s)
    elif not book.open_leases and not book.held and _all_done(book):
        set_run(book, change, run.ended("drained"), now_s)


def _drop_rest(book: Book, change: Change) -> None:
    """Without a partial last step, what does not fill one is dropped."""
    size = book.rules.step_size
    tokens = sum(rollout.tally.tokens for rollout in book.held.values())
    is_full = tokens >= size.tokens if size.tokens else len(book.held) >= size.rollouts
    if not is_full:
        for rollout in list(book.held.values()):
            book.drop(change, rollout, DropReason.RUN_ENDED, detail="does not fill a last step")


def _all_done(book: Book) -> bool:
    return book.draft is None and all(book.retention.is_done(step) for step in book.open_steps)


def waiting_for(book: Book) -> str:
    """What a drain still waits for, in words."""
    by_state = {
        StepState.BUILT: "the feed did not take step {}",
        StepState.SHIPPED: "not every rank committed step {}",
        StepState.ACKNOWLEDGED: "v{0} of step {0} was never applied",
    }
    for record in sorted(book.open_steps.values(), key=lambda record: record.step):
        if not book.retention.is_done(record.step):
            return by_state[record.state].format(record.step)
    if book.open_leases:
        return f"{len(book.open_leases)} leases are open"
    return f"{len(book.held)} rollouts are not packed" if book.held else "nothing"
