"""Who may join the feed, and from where it goes on.

Errors: RankRefused, with a code of docs/feed-protocol.md.
"""

from typing import Final

from sideband.feed.errors import RankRefused
from sideband.feed.facts import FIRST, FeedPlan, Hello, Place, RankState
from sideband.feed.limits import CREDIT_MAX
from sideband.model import ModelShape

RETRY_AFTER_S: Final = 0.5  # how soon a rank asks again for what only others can change


def check_identity(hello: Hello, plan: FeedPlan, model: ModelShape | None) -> None:
    """Run, place in the grid, credit and model must fit the feed."""
    if hello.run_id is not None and hello.run_id != plan.run_id:
        raise RankRefused("other_run", f"this feed serves {plan.run_id}, not {hello.run_id}")
    for name, value, size in (
        ("global_rank", hello.global_rank, plan.rank_count),
        ("dp_rank", hello.dp_rank, plan.dp_size),
        ("cp_rank", hello.cp_rank, plan.cp_size),
    ):
        if not 0 <= value < size:
            raise RankRefused("unknown_rank", f"{name} is {value}, must lie in [0, {size})")
    if not 1 <= hello.credit <= CREDIT_MAX:
        raise RankRefused("malformed", f"credit is {hello.credit}, must lie in [1, {CREDIT_MAX}]")
    if hello.model is not None and model is not None and hello.model != model:
        raise RankRefused("other_model", f"the steps are of {model}, not of {hello.model}")


def check_commit(step: int | None, *, last_step: int | None, plan: FeedPlan) -> None:
    """A commit must be of a step that can have been sent.

    A feed that was restarted may hold fewer steps than the one before it had sent, but that one
    held no more than ``steps_held_max`` either. Taken as it is, a commit of a later step would let
    that step's files go before the rank has read them.
    """
    if step is None or last_step is None or step <= last_step + plan.steps_held_max:
        return
    reason = f"commits step {step}, the last step that came is {last_step}"
    raise RankRefused("malformed", reason)


def check_successor(hello: Hello, known: RankState | None, *, generation: int) -> None:
    """A global rank is one process at a time; one of a failed generation stays out."""
    if known is None:
        return
    is_same = hello.instance == known.instance
    if known.generation != generation:
        if is_same:
            why = "" if known.abort is None else f"step {known.abort.step}: {known.abort.reason}"
            raise RankRefused("step_failed", why)
        return
    if not is_same and known.connection is not None:
        reason = f"rank {hello.global_rank} is held by process {known.instance}"
        raise RankRefused("rank_in_use", reason, retry_after_s=RETRY_AFTER_S)
    if (hello.dp_rank, hello.cp_rank) != (known.dp_rank, known.cp_rank):
        before = f"(dp {known.dp_rank}, cp {known.cp_rank})"
        now = f"(dp {hello.dp_rank}, cp {hello.cp_rank})"
        raise RankRefused("rank_moved", f"rank {hello.global_rank} was {before}, is now {now}")


def committed_after(hello: Hello, recorded: int | None, *, is_same: bool) -> int | None:
    """The rank's committed step: a new process decides, one that reconnects cannot go back."""
    if hello.committed_step is None:
        return recorded
    if is_same and recorded is not None:
        return max(recorded, hello.committed_step)
    return hello.committed_step


def resume_place(start: Place, hello: Hello, *, first_available: int | None) -> Place:
    """Where sending goes on: not before ``start``, the place after the committed step.

    Raises RankRefused when those steps are gone.
    """
    place = max(start, hello.resume or FIRST)
    if place != FIRST and first_available is not None and place[0] < first_available:
        reason = f"wants step {place[0]}, the feed holds steps from {first_available}"
        is_new = hello.lineage is None  # its trainer may have gone back, and the feed not know yet
        raise RankRefused("step_forgotten", reason, retry_after_s=RETRY_AFTER_S if is_new else None)
    return place


def admitted(
    hello: Hello,
    known: RankState | None,
    connection: bytes,
    *,
    generation: int,
    recorded: int | None,
    first_available: int | None,
    now_s: float,
) -> tuple[RankState, int | None]:
    """The rank as it joins, and what it has committed. Raises RankRefused as ``resume_place``.

    ``known`` is who spoke for it before, ``recorded`` what it had committed then.
    """
    is_same = known is not None and known.instance == hello.instance
    committed = committed_after(hello, recorded, is_same=is_same)
    start = FIRST if committed is None else (committed + 1, 0)
    rank = RankState(
        global_rank=hello.global_rank,
        dp_rank=hello.dp_rank,
        cp_rank=hello.cp_rank,
        instance=hello.instance,
        lineage=hello.lineage,
        generation=generation,
        connection=connection,
        credit=hello.credit,
        next=resume_place(start, hello, first_available=first_available),
        # What it received and did not read yet is not read: the rank tells after the welcome.
        read=known.read if known is not None and is_same else start,
        last_seen_s=now_s,
    )
    return rank, committed
