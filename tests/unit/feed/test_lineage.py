"""The trainer goes back: what was after its step is void, and comes again."""

from dataclasses import replace
from functools import partial
from itertools import islice

import pytest

from sideband.feed.delivery import Delivery
from sideband.feed.errors import LineageConflict, RankRefused, StepFailed
from sideband.feed.facts import Abort, GoneBack, RankState, Send
from sideband.feed.rank import RankFeed
from tests.unit.feed.builders import make_step
from tests.unit.feed.delivery_builders import (
    HELLO,
    PLAN,
    decisions,
    facts_of,
    hello_of,
    joined,
)
from tests.unit.feed.live import in_parallel, live_feed, plan_of, read_all

ROOMY = replace(PLAN, steps_held_max=8)


def trained(*, steps: int, committed: int) -> tuple[Delivery, list[RankState]]:
    """A feed that sent ``steps`` steps, of which both ranks have committed some."""
    delivery = Delivery(ROOMY)
    ranks = joined(delivery)
    for step in range(1, steps + 1):
        delivery.held.accept(facts_of(step, count=1, plan=ROOMY))
    for rank in ranks:
        rank.credit = 8
        decisions(delivery, rank)
        delivery.commit(rank.global_rank, committed)
    delivery.forget()
    return delivery, ranks


def back_to(step: int, *, lineage: int = 1, last_step: int = 5) -> GoneBack:
    return GoneBack(lineage=lineage, step=step, last_step=last_step)


def test_processes_of_before_abort_and_new_ones_go_on_after_the_step() -> None:
    delivery, ranks = trained(steps=5, committed=3)
    assert delivery.go_back(back_to(2)) == (4, 5)
    assert delivery.committed_step == 2
    for rank in ranks:
        assert decisions(delivery, rank) == [Abort(3, "the trainer went back to step 2")]
    with pytest.raises(RankRefused) as caught:
        delivery.hello(b"c9", hello_of(0), now_s=1.0)
    assert (caught.value.code, caught.value.reason) == (
        "step_failed",
        "step 3: the trainer went back to step 2",
    )
    for step in (3, 4):
        assert delivery.held.accept(facts_of(step, count=1, digest=f"again-{step}", plan=ROOMY))
    again = [
        delivery.hello(b"n%d" % rank, hello_of(rank, instance=f"new-{rank}"), now_s=1.0)
        for rank in range(2)
    ]
    for rank in again:
        sent = [one.step for one in decisions(delivery, rank) if isinstance(one, Send)]
        assert sent == [3, 4]
        delivery.commit(rank.global_rank, 4)
    assert delivery.forget() == (3, 4)


def test_a_commit_of_what_was_not_sent_since_is_refused_by_name() -> None:
    delivery, _ = trained(steps=5, committed=3)
    delivery.go_back(back_to(2))
    for step in (3, 4, 5):
        with pytest.raises(RankRefused) as caught:
            delivery.commit(0, step)
        assert caught.value.code == "went_back"
        stale = replace(hello_of(0, instance="of-before"), committed_step=step)
        with pytest.raises(RankRefused, match=f"went_back: committed step {step}"):
            delivery.hello(b"s", stale, now_s=1.0)
    assert delivery.commit(0, 2) is None
    assert delivery.committed_step == 2


def test_a_repeat_changes_nothing_and_another_account_is_refused() -> None:
    delivery, _ = trained(steps=5, committed=3)
    delivery.go_back(back_to(2, lineage=4))
    generation = delivery.generation
    assert delivery.go_back(back_to(2, lineage=4)) == ()
    for other in (back_to(1, lineage=4), back_to(2, lineage=3)):
        with pytest.raises(LineageConflict):
            delivery.go_back(other)
    assert delivery.generation == generation


def test_a_feed_that_was_started_anew_lets_ranks_that_came_back_stay() -> None:
    delivery = Delivery(ROOMY)
    for rank in range(2):
        delivery.hello(b"c%d" % rank, replace(hello_of(rank), committed_step=4), now_s=0.0)
    assert delivery.go_back(back_to(2, last_step=5)) == ()
    assert (delivery.generation, delivery.is_open) == (1, True)
    assert delivery.held.accept(facts_of(5, count=1, plan=ROOMY))
    assert [d for d in decisions(delivery, delivery.ranks[0]) if isinstance(d, Send)]


def test_a_feed_that_was_started_anew_does_not_keep_ranks_of_before() -> None:
    delivery = Delivery(ROOMY)
    delivery.hello(b"c0", replace(HELLO, committed_step=9), now_s=0.0)
    delivery.go_back(back_to(2, last_step=5))
    assert delivery.generation == 2
    assert delivery.held.accept(facts_of(3, count=1, plan=ROOMY))
    assert delivery.committed_step == 2, "what it had committed is void"


def test_a_feed_that_had_ended_takes_steps_again() -> None:
    delivery, _ = trained(steps=3, committed=3)
    delivery.held.is_ended = True
    assert delivery.is_drained
    delivery.go_back(back_to(1, last_step=3))
    assert delivery.held.accept(facts_of(2, count=1, plan=ROOMY))
    assert not delivery.is_drained


def read_three(feed: RankFeed) -> list[tuple[int, int, str]]:
    """Three steps, and more may come."""
    seen = []
    for step in islice(feed, 3):
        seen += [(batch.step, batch.index, batch.digest()) for batch in step]
        step.commit()
    return seen


def test_real_ranks_raise_and_their_successors_get_the_same_steps_again() -> None:
    steps = [make_step(step=number, form=None, model=None, cp_size=2) for number in (1, 2, 3)]
    with live_feed(plan_of(steps[0])) as feed:
        grid = [(dp, cp) for dp in range(steps[0].dp_size) for cp in range(2)]
        before = [feed.rank(dp, cp) for dp, cp in grid]
        for step in steps:
            feed.put(step)
        first = in_parallel([partial(read_three, rank) for rank in before])
        feed.do(lambda server: server.go_back(back_to(1, last_step=3)))
        for rank in before:
            with pytest.raises(StepFailed, match="went back to step 1"):
                rank.next_micro_batch()
        after = [feed.rank(dp, cp, committed_step=1) for dp, cp in grid]
        for step in steps[1:]:
            feed.put(step)
        feed.do(lambda server: server.end())
        second = in_parallel([partial(read_all, rank) for rank in after])
        feed.until(lambda delivery: delivery.is_drained)
    assert second == [[seen for seen in rank if seen[0] > 1] for rank in first]
