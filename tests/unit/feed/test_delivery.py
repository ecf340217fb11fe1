"""The delivery machine and its steps, one rule at a time; histories: test_delivery_histories."""

from dataclasses import replace

import pytest

from sideband.feed.delivery import Delivery
from sideband.feed.errors import (
    FeedEnded,
    FeedFull,
    FeedPaused,
    OtherGridStep,
    OtherRunStep,
    StepConflict,
    StepOutOfOrder,
    StepRefused,
)
from sideband.feed.facts import FIRST, End, Release, Send
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


def test_a_commit_that_comes_late_takes_none_back() -> None:
    """COMMIT is repeated until it is answered: an earlier one may come after a later one."""
    delivery = Delivery(PLAN)
    for step in (7, 8):
        delivery.held.accept(facts_of(step))
    joined(delivery)
    for step in (8, 7):
        delivery.commit(0, step)
    assert delivery.committed == {0: 8}
    delivery.commit(1, 8)
    assert delivery.forget() == (7, 8)
