"""Taking a delivered rollout in, or dropping it. Pure decisions on a ``Book``.

Whatever the outcome, every file that the body names is afterwards either held (by the rollout, or
by its group for the request's other choices) or given up.
"""

from dataclasses import dataclass, field, replace

from msgspec import structs

from services.kit.problems import Problem
from services.orchestrator.book import Book
from services.orchestrator.errors import (
    LeaseUnknown,
    RolloutConflict,
    RolloutInStep,
    RolloutUnknown,
)
from services.orchestrator.records import (
    HELD_STATES,
    Change,
    DropReason,
    Lease,
    LeaseState,
    Rollout,
    RolloutState,
    Tally,
)
from services.orchestrator.retention import Holder
from sideband.batch.types import Sample
from sideband.ids import RolloutId

_BY_LEASE = {
    LeaseState.ABORTED: DropReason.ABORTED,
    LeaseState.EXPIRED: DropReason.EXPIRED,
    LeaseState.CANCELLED: DropReason.CANCELLED,
    LeaseState.DELIVERED: DropReason.NO_LEASE,  # so long ago that the rollout is forgotten
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A delivered body after its checks. ``files`` are all that it names and that may be ours.

    ``reward`` set and ``is_waiting`` means that the advantage comes from the group.
    ``drop`` and ``refusal`` say why nothing of it will train.
    """

    rollout_id: RolloutId
    digest: str
    reward: float | None = None
    is_waiting: bool = False
    samples: tuple[Sample, ...] = ()
    tally: Tally = field(default_factory=Tally)
    files: frozenset[str] = frozenset()
    files_trained: frozenset[str] = frozenset()  # of these, what the samples refer to
    files_shared: frozenset[str] = frozenset()  # of these, what other choices may refer to
    drop: DropReason | None = None
    detail: str = ""
    refusal: str | None = None


def known(book: Book, rollout_id: RolloutId, digest: str) -> Rollout | None:
    """The rollout if exactly this body was delivered before."""
    rollout = book.rollouts.get(rollout_id)
    return rollout if rollout is not None and rollout.digest == digest else None


def deliver(book: Book, change: Change, delivery: Delivery, now_s: float) -> Rollout | Problem:
    """The rollout as recorded, or the problem of a body that belongs to no open work.

    A problem is returned and not raised: its files are given up in the same change.
    """
    before = book.rollouts.get(delivery.rollout_id)
    if before is not None and before.digest == delivery.digest:
        return before
    lease = book.lease_of_rollout(delivery.rollout_id)
    if before is not None or lease is None:
        change.delete_files += book.retention.discard(delivery.files)
        if before is not None:
            return RolloutConflict(delivery.rollout_id)
        return LeaseUnknown(
            f"Rollout {delivery.rollout_id} has no lease.", rollout_id=delivery.rollout_id
        )
    if lease.state is not LeaseState.OPEN:
        reason = DropReason.STALE if lease.reason == "stale" else _BY_LEASE[lease.state]
        late = replace(
            delivery, drop=reason, detail=f"lease: {lease.reason}", files_shared=frozenset()
        )
        rollout = _record(lease, late)
        book.put_rollout(change, rollout)
        change.delete_files += book.retention.discard(delivery.files)
        return rollout
    return _collect(book, change, delivery, lease, now_s)


def _collect(book: Book, change: Change, delivery: Delivery, lease: Lease, now_s: float) -> Rollout:
    book.put_lease(change, structs.replace(lease, state=LeaseState.DELIVERED))
    is_rewarded = delivery.drop is None  # what is dropped only below still has a valid reward
    delivery = _checked(book, delivery, lease)
    if lease.group_size > 1:  # its group is open: this member has not ended yet
        book.retention.hold(Holder("group", lease.group_id), delivery.files_shared)
    rollout = _record(lease, delivery)
    if rollout.state is RolloutState.DROPPED:
        book.put_rollout(change, rollout)
        book.discard_session(change, lease)  # an attempt may have left more than it names
    else:
        gone = book.retention.hold(Holder("rollout", rollout.rollout_id), rollout.files)
        assert not gone, "checked above"
        change.bodies[rollout.rollout_id] = rollout.samples
        if rollout.state is RolloutState.READY:
            book.make_ready(change, rollout)
        else:
            book.put_rollout(change, rollout)
    # Only now: what the rollout keeps must never be without a holder.
    change.delete_files += book.retention.release(Holder("lease", lease.lease_id))
    change.delete_files += book.retention.discard(delivery.files)
    _end_member(book, change, lease, delivery.reward, is_rewarded, now_s)
    return book.rollouts[rollout.rollout_id]


def _checked(book: Book, delivery: Delivery, lease: Lease) -> Delivery:
    """The delivery with a reason to drop it, where the state of the run has one."""
    if delivery.drop is not None:
        return delivery
    gone = [file for file in sorted(delivery.files_trained) if book.retention.is_given_up(file)]
    if gone:
        return replace(delivery, drop=DropReason.FILES_GONE, detail=f"deleted before: {gone[0]}")
    if not delivery.samples:
        return replace(delivery, drop=DropReason.NO_TRAINABLE_TOKENS)
    if book.is_stale(lease.policy_version):
        return replace(delivery, drop=DropReason.STALE)
    return delivery


def _record(lease: Lease, delivery: Delivery) -> Rollout:
    is_dropped = delivery.drop is not None
    state = RolloutState.WAITING if delivery.is_waiting else RolloutState.READY
    return Rollout(
        rollout_id=lease.rollout_id,
        group_id=lease.group_id,
        policy_version=lease.policy_version,
        index=lease.index,
        digest=delivery.digest,
        state=RolloutState.DROPPED if is_dropped else state,
        reward=delivery.reward,
        samples=() if is_dropped else delivery.samples,
        files=frozenset() if is_dropped else delivery.files_trained,
        files_shared=delivery.files_shared,
        tally=delivery.tally,
        reason=delivery.drop,
        detail=delivery.detail,
        refusal=delivery.refusal,
    )


def _end_member(
    book: Book,
    change: Change,
    lease: Lease,
    reward: float | None,
    is_rewarded: bool,
    now_s: float,
) -> None:
    if is_rewarded:
        result = book.groups.deliver(lease.group_id, lease.rollout_id, reward=reward, now_s=now_s)
    else:
        result = book.groups.fail(lease.group_id, lease.rollout_id, now_s=now_s)
    if result is not None:
        book.settle_group(change, result)


def remove(book: Book, change: Change, rollout_id: RolloutId) -> Rollout:
    """An operator drops a held rollout; its reward leaves the group. Idempotent.

    Raises RolloutUnknown, RolloutInStep.
    """
    rollout = book.rollouts.get(rollout_id)
    if rollout is None:
        raise RolloutUnknown(f"No rollout {rollout_id}.", rollout_id=rollout_id)
    if rollout.state in HELD_STATES:
        book.groups.withdraw(rollout.group_id, rollout_id)
        return book.drop(change, rollout, DropReason.REMOVED, detail="by an operator")
    if rollout.state is not RolloutState.DROPPED:
        raise RolloutInStep(rollout_id, rollout.step)
    return rollout
