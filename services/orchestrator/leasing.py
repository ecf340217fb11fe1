"""Leases: taken at dispatch, renewed, aborted, expired. Pure decisions on a ``Book``."""

from dataclasses import dataclass

from msgspec import structs

from services.orchestrator.book import Book
from services.orchestrator.errors import (
    RETRY_SOON,
    LeaseConflict,
    LeaseEnded,
    LeaseUnknown,
    PolicyBehind,
    PolicyUnknown,
    TooManyLeases,
    TooManyRollouts,
)
from services.orchestrator.records import Change, Lease, LeaseState
from services.orchestrator.retention import Holder
from sideband.ids import GroupId, LeaseId, RolloutId, SessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """What a client that dispatches a rollout says of it."""

    rollout_id: RolloutId
    group_id: GroupId
    group_size: int
    env_name: str
    session_id: SessionId | None


def take(book: Book, change: Change, asked: LeaseRequest, lease_id: LeaseId, now_s: float) -> Lease:
    """A new lease with the policy version of this moment; the same one for the same rollout.

    Raises LeaseConflict, the phase's LeaseRefused, PolicyUnknown, PolicyBehind, TooManyLeases,
    TooManyRollouts, and what ``Groups.join`` raises.
    """
    known = book.lease_of_rollout(asked.rollout_id)
    if known is not None:
        if _facts(known) != _facts(asked):
            raise LeaseConflict(asked.rollout_id)
        return known
    problem = book.run.lease_problem()
    if problem is not None:
        raise problem
    if book.policy_version is None:
        raise PolicyUnknown(_why_unknown(book), headers=RETRY_SOON)
    if book.is_stale(book.policy_version):
        raise PolicyBehind(
            f"v{book.policy_version} is too old for step {book.next_step}.", headers=RETRY_SOON
        )
    if len(book.open_leases) >= book.rules.leases_open_max:
        detail = f"{book.rules.leases_open_max} leases are open."
        raise TooManyLeases(detail, headers=RETRY_SOON)
    if len(book.held) >= book.rules.rollouts_held_max:
        detail = f"{book.rules.rollouts_held_max} rollouts wait for the trainer."
        raise TooManyRollouts(detail, headers=RETRY_SOON)
    book.groups.join(
        asked.group_id,
        size=asked.group_size,
        rollout_id=asked.rollout_id,
        index=book.next_lease_index,
        now_s=now_s,
    )
    lease = Lease(
        lease_id=lease_id,
        rollout_id=asked.rollout_id,
        group_id=asked.group_id,
        group_size=asked.group_size,
        env_name=asked.env_name,
        session_id=asked.session_id,
        policy_version=book.policy_version,
        index=book.next_lease_index,
        taken_s=now_s,
        deadline_s=now_s + book.rules.lease_timeout_s,
    )
    book.next_lease_index += 1
    book.put_lease(change, lease)
    return lease


def _why_unknown(book: Book) -> str:
    if book.policy_before is None:
        return "No proxy has told the policy version yet."
    return (
        f"The trainer went back to step {book.returns[-1].step}, the engines may still serve "
        f"v{book.policy_before} of before: give them the weights of that step, or tell their "
        f"version with lineage {book.lineage}."
    )


def _facts(item: Lease | LeaseRequest) -> tuple[object, ...]:
    return (item.group_id, item.group_size, item.env_name, item.session_id)


def find(book: Book, lease_id: LeaseId) -> Lease:
    """The lease, open or ended. Raises LeaseUnknown."""
    lease = book.leases.get(lease_id)
    if lease is None:
        raise LeaseUnknown(f"No lease {lease_id}.", lease_id=lease_id)
    return lease


def renew(book: Book, change: Change, lease_id: LeaseId, files: list[str], now_s: float) -> Lease:
    """Move the deadline of an open lease; ``files`` that it has written are held for it.

    Raises LeaseUnknown, LeaseEnded.
    """
    lease = find(book, lease_id)
    if lease.state is not LeaseState.OPEN:
        raise LeaseEnded(lease_id, lease.state.value)
    gone = book.retention.hold(Holder("lease", lease_id), files)
    renewed = structs.replace(
        lease,
        deadline_s=now_s + book.rules.lease_timeout_s,
        files=lease.files.union(files) - set(gone),
    )
    book.put_lease(change, renewed)
    return renewed


def abort(book: Book, change: Change, lease_id: LeaseId, now_s: float) -> Lease:
    """The client gives the rollout up. Idempotent. Raises LeaseUnknown; LeaseEnded if delivered."""
    lease = find(book, lease_id)
    if lease.state is LeaseState.DELIVERED:
        raise LeaseEnded(lease_id, lease.state.value)
    if lease.state is LeaseState.OPEN:
        book.end_lease(change, lease, LeaseState.ABORTED, reason="aborted", now_s=now_s)
    return book.leases[lease_id]


def expire(book: Book, change: Change, now_s: float) -> None:
    """End the leases whose deadline has passed, and the groups that nobody will complete."""
    for lease in [lease for lease in book.open_leases.values() if lease.deadline_s <= now_s]:
        book.end_lease(change, lease, LeaseState.EXPIRED, reason="deadline", now_s=now_s)
    for group_id in book.groups.overdue(now_s=now_s, timeout_s=book.rules.group_timeout_s):
        book.settle_group(change, book.groups.close(group_id))
