"""The trainer goes back: what was after its step is void, and comes again."""

from dataclasses import replace
from functools import partial
from itertools import islice

import pytest

from sideband.feed.answers import Answerer
from sideband.feed.delivery import Delivery
from sideband.feed.errors import LineageConflict, RankRefused, StepFailed
from sideband.feed.facts import Abort, GoneBack, Hello, RankState, Send
from sideband.feed.frames import encode_message
from sideband.feed.messages import HelloMessage, WelcomeMessage
from sideband.feed.observer import FeedObserver
from sideband.feed.rank import RankFeed
from tests.unit.feed.builders import make_step
from tests.unit.feed.delivery_builders import (
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


def returned(lineage: int | None, committed: int, *, rank: int = 0) -> Hello:
    """The hello of a process that was there before the feed was started anew."""
    resume = (committed + 1, 0)
    return replace(hello_of(rank), committed_step=committed, resume=resume, lineage=lineage)


def refusal_of(delivery: Delivery, hello: Hello) -> str:
    with pytest.raises(RankRefused) as caught:
        delivery.hello(b"again", hello, now_s=1.0)
    return str(caught.value)


def test_a_feed_that_was_started_anew_asks_everybody_again_once_it_is_told() -> None:
    delivery = Delivery(ROOMY)
    hellos = [returned(1, 4), returned(None, 2, rank=1)]  # trained since, and from the checkpoint
    for hello in hellos:
        delivery.hello(b"c%d" % hello.global_rank, hello, now_s=0.0)
    assert delivery.is_open
    assert delivery.go_back(back_to(2, last_step=5)) == ()
    assert (delivery.generation, delivery.is_open, delivery.committed) == (1, False, {})
    for hello in hellos:
        connection = b"c%d" % hello.global_rank
        assert delivery.rank_of(connection, now_s=0.5) is None, "RESYNC"
        delivery.hello(connection, hello, now_s=0.5)
    assert delivery.held.accept(facts_of(3, count=1, plan=ROOMY))
    sent = [[d.step for d in decisions(delivery, delivery.ranks[r]) if isinstance(d, Send)]
            for r in (0, 1)]  # fmt: skip
    assert sent == [[], [3]]


def test_a_process_of_before_is_told_apart_by_its_lineage_whatever_it_committed() -> None:
    delivery = Delivery(ROOMY)
    for rank in (0, 1):
        delivery.hello(b"c%d" % rank, returned(0, 3, rank=rank), now_s=0.0)
    delivery.go_back(back_to(2, last_step=5))
    for step in (3, 4):
        assert delivery.held.accept(facts_of(step, count=1, plan=ROOMY))
    for committed in (1, 2, 3, 9):
        assert refusal_of(delivery, returned(0, committed)) == (
            "other_lineage: is of lineage 0, the run is at lineage 1, "
            "the trainer went back to step 2"
        )
    assert (delivery.ranks, delivery.committed) == ({}, {})
    assert refusal_of(delivery, returned(2, 2)).startswith("other_lineage")


def test_a_process_of_before_does_not_wait_for_the_place_of_its_successor() -> None:
    delivery, _ = trained(steps=3, committed=3)
    delivery.go_back(back_to(2))
    for rank in range(2):
        delivery.hello(b"n%d" % rank, hello_of(rank, instance=f"new-{rank}"), now_s=1.0)
    stale = replace(returned(0, 2), instance="of-before")
    assert refusal_of(delivery, stale).startswith("other_lineage")
    delivery.leave(b"n0")
    assert refusal_of(delivery, stale).startswith("other_lineage")


def test_a_commit_of_another_lineage_is_refused_also_of_a_step_that_comes_again() -> None:
    delivery, _ = trained(steps=3, committed=2)
    delivery.go_back(back_to(2))
    assert delivery.held.accept(facts_of(3, count=1, digest="again", plan=ROOMY))
    ranks = [
        delivery.hello(b"n%d" % rank, hello_of(rank, instance=f"new-{rank}"), now_s=1.0)
        for rank in range(2)
    ]
    for rank in ranks:
        assert decisions(delivery, rank)
        with pytest.raises(RankRefused, match="other_lineage: is of lineage 0"):
            delivery.commit(rank.global_rank, 3, lineage=0)
        assert delivery.commit(rank.global_rank, 3, lineage=1) is None
    assert delivery.forget() == (3,)


def test_commits_that_come_before_a_new_feed_is_told_stay_where_they_are_right() -> None:
    delivery = Delivery(ROOMY)
    delivery.commit(0, 4, lineage=1)
    delivery.commit(1, 4, lineage=0)
    delivery.go_back(back_to(2, last_step=5))
    assert delivery.committed == {0: 4}
    delivery = Delivery(ROOMY)
    delivery.commit(0, 4)  # by somebody who does not say: by its number
    delivery.commit(1, 6)
    delivery.go_back(back_to(2, last_step=5))
    assert delivery.committed == {0: 4}


@pytest.mark.parametrize("is_hello", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_process_of_before_hides_no_commit_from_a_feed_that_is_told_later(
    is_hello: bool, is_first: bool
) -> None:
    delivery = Delivery(ROOMY)

    def of_before() -> None:
        if is_hello:
            delivery.hello(b"old", returned(0, 4), now_s=0.0)
        delivery.commit(0, 5, lineage=0)

    if is_first:
        of_before()
    assert delivery.commit(0, 3, lineage=1) is None
    if not is_first:
        of_before()
    delivery.leave(b"old")
    delivery.hello(b"new", hello_of(0, instance="new"), now_s=1.0)  # it leaves that to the feed
    delivery.go_back(back_to(2, last_step=5))
    assert delivery.committed == {0: 3}, "it was confirmed"
    delivery.hello(b"new", returned(1, 2), now_s=1.0)
    assert delivery.committed == {0: 2}, "a new process decides"


def test_a_feed_that_is_not_told_yet_lets_nobody_begin_where_others_have_been() -> None:
    delivery = Delivery(ROOMY)
    answerer = Answerer(delivery, FeedObserver())
    new = HelloMessage(instance="new", dp_rank=0, cp_rank=0, credit=4)

    def begins_after() -> int | None:
        (welcome,) = answerer.answers(b"new", encode_message(new), now_s=1.0)
        assert isinstance(welcome, WelcomeMessage)
        return welcome.committed_step

    delivery.hello(b"old", returned(0, 4), now_s=0.0)
    delivery.leave(b"old")
    assert begins_after() is None
    delivery.go_back(back_to(0, last_step=5))
    assert begins_after() is None
    delivery.commit(0, 1, lineage=1)
    delivery.leave(b"new")
    assert begins_after() == 1


def test_a_new_feed_in_a_run_that_never_went_back_takes_only_what_is_of_lineage_0() -> None:
    delivery = Delivery(ROOMY)
    assert delivery.held.accept(facts_of(5, count=1, plan=ROOMY))
    assert refusal_of(delivery, returned(1, 4)) == (
        "other_lineage: is of lineage 1, the run is at lineage 0"
    )
    for rank, lineage in ((0, 0), (1, None)):
        delivery.hello(b"c%d" % rank, returned(lineage, 4, rank=rank), now_s=0.0)
        assert delivery.commit(rank, 4, lineage=lineage) is None
    assert delivery.is_open


def test_what_ranks_of_before_had_read_is_not_released_to_those_that_follow() -> None:
    delivery = Delivery(ROOMY)
    for rank in range(2):
        joined_rank = delivery.hello(b"c%d" % rank, returned(0, 3, rank=rank), now_s=0.0)
        delivery.progress(joined_rank, seq=0, read=(5, 1))
    assert delivery.released == (5, 1)
    delivery.go_back(back_to(3, last_step=5))
    assert delivery.held.accept(facts_of(4, count=2, plan=ROOMY))
    for rank in range(2):
        new = replace(hello_of(rank, instance=f"new-{rank}"), committed_step=3)
        delivery.hello(b"n%d" % rank, new, now_s=1.0)
    assert delivery.released == (4, 0)


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
