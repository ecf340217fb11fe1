"""Who holds the others up: decisions about a ``Delivery``, for answers, alarms and time-outs."""

from typing import TYPE_CHECKING

from sideband.feed.facts import RankState

if TYPE_CHECKING:
    from sideband.feed.delivery import Delivery


def is_present(delivery: "Delivery", global_rank: int) -> bool:
    """Whether the rank has joined this generation and is connected."""
    rank = delivery.ranks.get(global_rank)
    is_current = rank is not None and rank.generation == delivery.generation
    return is_current and rank is not None and rank.connection is not None


def absent(delivery: "Delivery") -> tuple[int, ...]:
    """The ranks that are not there, ascending."""
    return tuple(rank for rank in range(delivery.plan.rank_count) if not is_present(delivery, rank))


def waiting_for(delivery: "Delivery") -> tuple[int, ...]:
    """Absent ranks, else those that have read least; nobody when all have read the same."""
    if delivery.is_drained:
        return ()
    if missing := absent(delivery):
        return missing
    reads = [delivery.ranks[rank].read for rank in range(delivery.plan.rank_count)]
    least = min(reads)
    return () if least == max(reads) else tuple(i for i, read in enumerate(reads) if read == least)


def uncommitted(delivery: "Delivery", step: int) -> tuple[int, ...]:
    """The ranks that have not committed ``step``, ascending."""
    committed = delivery.committed
    return tuple(r for r in range(delivery.plan.rank_count) if committed.get(r, 0) < step)


def blocking(delivery: "Delivery") -> tuple[int, ...]:
    """Why a full feed stays full: absent ranks that have not committed the oldest step."""
    oldest = delivery.held.oldest
    if oldest is None:
        return ()
    return tuple(r for r in uncommitted(delivery, oldest) if not is_present(delivery, r))


def absent_too_long(delivery: "Delivery", *, now_s: float) -> tuple[RankState, int, str] | None:
    """A rank that is away for longer than the plan allows, the step that it fails, and why."""
    limit_s = delivery.plan.rank_lost_fails_after_s
    if limit_s is None or not delivery.is_open:
        return None
    for rank in delivery.ranks.values():
        absent_s = now_s - rank.last_seen_s
        done = delivery.committed.get(rank.global_rank, 0)
        pending = [step for step in delivery.held.steps if step > done]
        if rank.connection is None and absent_s > limit_s and pending:
            return rank, pending[0], f"rank {rank.global_rank} was last seen {absent_s:.0f} s ago"
    return None
