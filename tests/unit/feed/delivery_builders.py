"""Facts, plans and hellos for the tests of the delivery machine."""

from dataclasses import replace

from sideband.feed.delivery import Delivery
from sideband.feed.facts import Decision, FeedPlan, Hello, RankState, StepFacts
from sideband.ids import RunId

PLAN = FeedPlan(
    run_id=RunId("run"),
    rank_count=2,
    dp_size=1,
    cp_size=2,
    layout="contiguous",
    steps_held_max=2,
    peer_timeout_s=10.0,
)


def facts_of(
    step: int, *, count: int = 2, digest: str | None = None, plan: FeedPlan = PLAN
) -> StepFacts:
    """A step that fits the plan."""
    return StepFacts(
        run_id=RunId("run"),
        step=step,
        count=count,
        digest=digest or f"digest-{step}",
        dp_size=plan.dp_size,
        cp_size=plan.cp_size,
        layout=plan.layout,
        model=None,
    )


HELLO = Hello(
    instance="process-0",
    run_id=RunId("run"),
    global_rank=0,
    dp_rank=0,
    cp_rank=0,
    committed_step=None,
    resume=None,
    lineage=None,
    committed_lineage=None,
    credit=4,
    model=None,
)


def hello_of(rank: int, *, instance: str | None = None) -> Hello:
    """The hello of one of PLAN's ranks."""
    return replace(HELLO, global_rank=rank, cp_rank=rank, instance=instance or f"process-{rank}")


def joined(delivery: Delivery, *, now_s: float = 0.0) -> list[RankState]:
    """All of PLAN's ranks, connected."""
    return [
        delivery.hello(b"c%d" % rank, hello_of(rank), now_s=now_s)
        for rank in range(delivery.plan.rank_count)
    ]


def decisions(delivery: Delivery, rank: RankState) -> list[Decision]:
    """Everything that the machine has to say to a rank now."""
    told = []
    while (decision := delivery.next_for(rank)) is not None:
        told.append(decision)
    return told
