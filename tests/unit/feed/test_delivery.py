"""The delivery machine, one rule at a time; random histories are in test_delivery_histories."""

from dataclasses import replace

import pytest

from sideband.feed.delivery import Delivery
from sideband.feed.errors import (
    FeedEnded,
    FeedFull,
    FeedPaused,
    OtherGridStep,
    OtherRunStep,
    RankRefused,
    StepConflict,
    StepOutOfOrder,
    StepRefused,
)
from sideband.feed.facts import FIRST, Abort, End, Hello, Release, Send
from sideband.feed.held import DIGESTS_KEPT_MAX
from sideband.ids import RunId
from sideband.testing.batches import NARROW_MODEL, WIDE_MODEL
from tests.unit.feed.delivery_builders import HELLO, PLAN, decisions, facts_of, hello_of, joined


def test_steps_come_in_order_and_once() -> None:
    held = Delivery(PLAN).held
    assert held.first_available is None
    assert held.accept(facts_of(3))
    assert not held.accept(facts_of(3))
    assert held.accept(facts_of(4))
    for facts, error in (
        (facts_of(3, digest="other"), StepConflict),
        (facts_of(6), StepOutOfOrder),
        (facts_of(2), StepOutOfOrder),
        (facts_of(5), FeedFull),
    ):
        with pytest.raises(error) as caught:
            held.accept(facts)
        assert isinstance(caught.value, StepRefused)
        assert caught.value.step == facts.step
    assert held.steps == (3, 4)


def test_steps_of_another_run_grid_or_model_are_refused() -> None:
    held = Delivery(PLAN).held
    held.accept(replace(facts_of(1), model=WIDE_MODEL))
    two = facts_of(2)
    with pytest.raises(OtherRunStep):
        held.accept(replace(two, run_id=RunId("another")))
    for name, other in (
        ("dp_size", replace(two, dp_size=9)),
        ("cp_size", replace(two, cp_size=9)),
        ("layout", replace(two, layout="zigzag")),
        ("model", replace(two, model=NARROW_MODEL)),
    ):
        with pytest.raises(OtherGridStep) as caught:
            held.accept(other)
        assert caught.value.what == name
    held.accept(two)  # a step without segments has no model


def test_a_paused_or_ended_feed_takes_no_step_but_recognises_repeats() -> None:
    held = Delivery(PLAN).held
    held.accept(facts_of(1))
    held.is_paused = True
    assert not held.accept(facts_of(1))
    with pytest.raises(FeedPaused):
        held.accept(facts_of(2))
    held.is_paused, held.is_ended = False, True
    assert not held.accept(facts_of(1))
    with pytest.raises(FeedEnded):
        held.accept(facts_of(2))


def test_what_is_remembered_of_done_steps_is_bounded() -> None:
    held = Delivery(PLAN).held
    for step in range(1, DIGESTS_KEPT_MAX + 3):
        held.accept(facts_of(step))
        held.forget(committed_step=step)
    assert not held.accept(facts_of(3))
    with pytest.raises(StepOutOfOrder):
        held.accept(facts_of(1))
    assert held.steps == ()
    assert held.first_available == DIGESTS_KEPT_MAX + 3


def test_credit_bounds_what_is_on_the_way() -> None:
    delivery = Delivery(PLAN)
    delivery.held.accept(facts_of(1, count=9))
    rank = delivery.hello(b"c0", replace(HELLO, credit=2), now_s=0)
    delivery.hello(b"c1", hello_of(1), now_s=0)
    assert decisions(delivery, rank) == [Send(1, 0, 9, 1), Send(1, 1, 9, 2)]
    delivery.progress(rank, seq=1, read=FIRST)
    assert decisions(delivery, rank) == [Send(1, 2, 9, 3)]
    delivery.progress(rank, seq=999, read=FIRST)  # more than was sent is what was sent
    delivery.progress(rank, seq=1, read=FIRST)  # credit never shrinks
    assert decisions(delivery, rank) == [Send(1, 3, 9, 4), Send(1, 4, 9, 5)]


def test_what_a_reconnecting_rank_received_does_not_count_as_read() -> None:
    """A restarted feed knows nothing of what was read: it must not release on resume places."""
    delivery = Delivery(PLAN)
    delivery.held.accept(facts_of(1, count=3))
    first = delivery.hello(b"c0", replace(hello_of(0), resume=(1, 2)), now_s=0)
    second = delivery.hello(b"c1", replace(hello_of(1), resume=(1, 2)), now_s=0)
    assert first.next == (1, 2)
    delivery.progress(first, seq=0, read=(1, 1))
    assert delivery.released == (0, 0)
    delivery.progress(second, seq=0, read=(1, 1))
    assert delivery.released == (1, 1)
    again = delivery.hello(b"c2", replace(hello_of(1), resume=(1, 3)), now_s=1)
    assert again.read == (1, 1)  # the same process keeps what it read


def test_releases_of_a_failed_generation_do_not_count_in_the_next() -> None:
    delivery = Delivery(PLAN)
    delivery.held.accept(facts_of(1, count=3))
    ranks = joined(delivery)
    for rank in ranks:
        delivery.progress(rank, seq=0, read=(1, 2))
    delivery.fail(ranks[0], 1, "disk")
    new = [
        delivery.hello(b"n%d" % rank, hello_of(rank, instance=f"new-{rank}"), now_s=1)
        for rank in range(2)
    ]
    assert not any(isinstance(decision, Release) for decision in decisions(delivery, new[0]))
    for rank in new:
        delivery.progress(rank, seq=0, read=(1, 1))
    assert decisions(delivery, new[0]) == [Release((1, 1))]


def test_nothing_is_sent_while_paused_but_releases_are_told() -> None:
    delivery = Delivery(PLAN)
    delivery.held.accept(facts_of(1, count=1))
    first, second = joined(delivery)
    assert decisions(delivery, first) == [Send(1, 0, 1, 1)]
    delivery.held.is_paused = True
    assert decisions(delivery, second) == []
    delivery.held.is_paused = False
    assert decisions(delivery, second) == [Send(1, 0, 1, 1)]
    delivery.held.is_paused = True
    for rank in (first, second):
        delivery.progress(rank, seq=0, read=(2, 0))
    assert decisions(delivery, first) == [Release((2, 0))]


def test_a_micro_batch_is_released_when_all_have_read_it() -> None:
    delivery = Delivery(PLAN)
    delivery.held.accept(facts_of(1, count=2))
    first, second = joined(delivery)
    decisions(delivery, first)
    decisions(delivery, second)
    delivery.progress(first, seq=0, read=(2, 0))
    assert decisions(delivery, first) == []
    assert delivery.waiting_for() == (1,)
    delivery.progress(second, seq=0, read=(1, 1))
    assert decisions(delivery, first) == [Release((1, 1))]
    assert decisions(delivery, second) == [Release((1, 1))]


def test_a_release_rides_on_a_micro_batch_where_one_is_due() -> None:
    delivery = Delivery(PLAN)
    delivery.held.accept(facts_of(1, count=3))
    first = delivery.hello(b"c0", replace(hello_of(0), credit=1), now_s=0)
    second = delivery.hello(b"c1", replace(hello_of(1), credit=1), now_s=0)
    for rank in (first, second):
        assert decisions(delivery, rank) == [Send(1, 0, 3, 1)]
    delivery.progress(first, seq=0, read=(1, 1))
    delivery.progress(second, seq=1, read=(1, 1))
    assert decisions(delivery, first) == [Release((1, 1))]  # without credit nothing else comes
    assert decisions(delivery, second) == [Send(1, 1, 3, 2, (1, 1))]


def test_only_ranks_that_something_happened_to_are_looked_at() -> None:
    delivery = Delivery(PLAN)
    ranks = joined(delivery)
    assert delivery.stirred() == ranks
    assert delivery.stirred() == []
    delivery.progress(ranks[1], seq=0, read=(1, 1))
    assert delivery.stirred() == [ranks[1]]
    delivery.progress(ranks[0], seq=0, read=(1, 1))  # the last one: now it is released to all
    assert delivery.stirred() == ranks
    delivery.stir_all()
    assert delivery.stirred() == ranks


def test_end_follows_the_last_step_once() -> None:
    delivery = Delivery(PLAN)
    delivery.held.accept(facts_of(1, count=1))
    first, second = joined(delivery)
    delivery.held.is_ended = True
    assert decisions(delivery, first) == [Send(1, 0, 1, 1), End(1)]
    assert decisions(delivery, first) == []
    delivery.progress(second, seq=0, read=FIRST)
    assert End(1) in decisions(delivery, second)
    assert not delivery.is_drained
    for rank in (0, 1):
        assert delivery.commit(rank, 1) is None
    assert delivery.forget() == (1,)
    assert delivery.is_drained
    assert delivery.waiting_for() == ()


def test_a_run_without_steps_ends_too() -> None:
    delivery = Delivery(PLAN)
    first, _ = joined(delivery)
    assert decisions(delivery, first) == []
    delivery.held.is_ended = True
    assert decisions(delivery, first) == [End(0)]
    assert delivery.committed_step is None


def test_a_step_is_forgotten_when_every_global_rank_has_committed_it() -> None:
    delivery = Delivery(PLAN)
    delivery.held.accept(facts_of(7))
    delivery.held.accept(facts_of(8))
    joined(delivery)
    assert delivery.committed_step == 6
    delivery.commit(0, 8)
    assert delivery.forget() == ()
    delivery.commit(1, 7)
    assert delivery.forget() == (7,)
    assert delivery.committed_step == 7


REFUSED: list[tuple[Hello, str]] = [
    (replace(HELLO, run_id=RunId("another")), "other_run"),
    (replace(HELLO, global_rank=2), "unknown_rank"),
    (replace(HELLO, dp_rank=1), "unknown_rank"),
    (replace(HELLO, cp_rank=-1), "unknown_rank"),
    (replace(HELLO, credit=0), "malformed"),
    (replace(HELLO, credit=257), "malformed"),
    (replace(HELLO, model=NARROW_MODEL), "other_model"),
    (replace(HELLO, committed_step=3), "step_forgotten"),
    (replace(HELLO, resume=(2, 1)), "step_forgotten"),
]


@pytest.mark.parametrize(("hello", "code"), REFUSED)
def test_a_hello_that_does_not_fit_has_its_code(hello: Hello, code: str) -> None:
    delivery = Delivery(PLAN)
    delivery.held.accept(replace(facts_of(5), model=WIDE_MODEL))
    with pytest.raises(RankRefused) as caught:
        delivery.hello(b"c", hello, now_s=0)
    assert (caught.value.code, caught.value.retry_after_s) == (code, None)
    assert delivery.ranks == {}


def test_one_process_at_a_time_holds_a_rank() -> None:
    delivery = Delivery(PLAN)
    joined(delivery)
    with pytest.raises(RankRefused) as caught:
        delivery.hello(b"c9", hello_of(0, instance="another"), now_s=1)
    assert caught.value.code == "rank_in_use"
    assert caught.value.retry_after_s
    delivery.leave(b"c0")
    assert delivery.hello(b"c9", hello_of(0, instance="another"), now_s=1).connection == b"c9"
    delivery.leave(b"c9")
    moved = replace(hello_of(0, instance="third"), cp_rank=1)
    with pytest.raises(RankRefused, match="rank_moved"):
        delivery.hello(b"c10", moved, now_s=1)


def test_the_same_process_on_a_new_connection_replaces_the_old() -> None:
    delivery = Delivery(PLAN)
    joined(delivery)
    again = delivery.hello(b"new", replace(hello_of(0), resume=(1, 1)), now_s=1)
    assert again.next == (1, 1)
    assert delivery.rank_of(b"c0", now_s=1) is None
    assert delivery.rank_of(b"new", now_s=2) is again
    assert again.last_seen_s == 2
    assert delivery.leave(b"c0") is None


def test_a_connection_speaks_for_one_rank() -> None:
    delivery = Delivery(PLAN)
    joined(delivery)
    delivery.leave(b"c1")
    delivery.hello(b"c0", hello_of(1), now_s=1)
    assert delivery.ranks[0].connection is None
    assert delivery.waiting_for() == (0,)


def test_a_new_process_decides_what_its_rank_has_committed() -> None:
    delivery = Delivery(PLAN)
    delivery.held.accept(facts_of(1))
    delivery.held.accept(facts_of(2))
    joined(delivery)
    delivery.commit(0, 2)
    same = delivery.hello(b"c2", replace(hello_of(0), committed_step=1), now_s=1)
    assert same.next == (3, 0)  # a connection cannot undo a commit
    delivery.leave(b"c2")
    back = replace(hello_of(0, instance="restarted"), committed_step=1)
    assert delivery.hello(b"c3", back, now_s=1).next == (2, 0)  # a checkpoint can
    assert delivery.committed[0] == 1
    delivery.leave(b"c3")
    unsure = hello_of(0, instance="restarted-again")
    assert delivery.hello(b"c4", unsure, now_s=1).next == (2, 0)  # as the feed remembers


def test_silence_makes_a_rank_lost_and_names_it() -> None:
    delivery = Delivery(PLAN)
    first, _ = joined(delivery, now_s=0)
    delivery.rank_of(b"c0", now_s=9)
    assert [rank.global_rank for rank in delivery.tick(now_s=11)] == [1]
    assert delivery.tick(now_s=12) == ()
    assert delivery.waiting_for() == (1,)
    assert delivery.failure is None
    assert decisions(delivery, first) == []
    assert delivery.next_for(delivery.ranks[1]) is None


def test_a_rank_that_is_lost_for_too_long_fails_its_step() -> None:
    delivery = Delivery(replace(PLAN, rank_lost_fails_after_s=30))
    first, _ = joined(delivery, now_s=0)
    delivery.held.accept(facts_of(4))
    delivery.leave(b"c1")
    delivery.rank_of(b"c0", now_s=25)
    delivery.tick(now_s=29)
    assert delivery.failure is None
    delivery.tick(now_s=31)
    assert delivery.failure is not None
    assert (delivery.failure.step, delivery.failure.rank) == (4, 1)
    assert decisions(delivery, first) == [Abort(4, "rank 1 was last seen 31 s ago")]
    delivery.tick(now_s=32)
    assert delivery.generation == 2


def test_a_lost_rank_with_nothing_left_to_do_fails_nothing() -> None:
    delivery = Delivery(replace(PLAN, rank_lost_fails_after_s=30))
    joined(delivery, now_s=0)
    delivery.tick(now_s=1000)
    assert delivery.failure is None


def test_a_failure_aborts_its_generation_and_the_next_goes_on() -> None:
    delivery = Delivery(PLAN)
    delivery.held.accept(facts_of(1))
    first, second = joined(delivery)
    assert delivery.fail(first, 1, "broken disk")
    assert not delivery.fail(second, 1, "me too")
    assert decisions(delivery, first) == decisions(delivery, second) == [Abort(1, "broken disk")]
    assert delivery.commit(1, 1) == Abort(1, "broken disk")
    delivery.progress(second, seq=0, read=(9, 9))
    assert second.read == (0, 0)
    with pytest.raises(RankRefused, match="step_failed: step 1: broken disk"):
        delivery.hello(b"c2", hello_of(0), now_s=1)
    assert delivery.waiting_for() == (0, 1)
    new = delivery.hello(b"n0", hello_of(0, instance="new-0"), now_s=1)
    assert decisions(delivery, new) == []
    assert delivery.failure is not None
    delivery.hello(b"n1", hello_of(1, instance="new-1"), now_s=1)
    assert delivery.failure is None
    assert decisions(delivery, new) == [Send(1, 0, 2, 1), Send(1, 1, 2, 2)]
    assert delivery.commit(1, 1) is None
    with pytest.raises(RankRefused, match="rank_in_use"):
        delivery.hello(b"c3", hello_of(0), now_s=1)
