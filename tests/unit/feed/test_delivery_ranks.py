"""The delivery machine and its ranks: who may join, who is lost, whose failure ends a step."""

from dataclasses import replace

import pytest

from sideband.feed.delivery import Delivery
from sideband.feed.errors import RankRefused, StepOutOfOrder
from sideband.feed.facts import Abort, Hello, Send
from sideband.ids import RunId
from sideband.testing.batches import NARROW_MODEL, WIDE_MODEL
from tests.unit.feed.delivery_builders import HELLO, PLAN, decisions, facts_of, hello_of, joined

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
    is_told_later = code == "step_forgotten"  # the trainer may have gone back
    assert caught.value.code == code
    assert (caught.value.retry_after_s is not None) == is_told_later
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


def test_what_all_have_committed_already_is_forgotten_as_it_comes_or_need_not_come() -> None:
    delivery = Delivery(replace(PLAN, steps_held_max=2))
    for rank in range(PLAN.rank_count):
        before = replace(hello_of(rank), committed_step=3)
        delivery.hello(b"c%d" % rank, before, now_s=0.0)
        assert delivery.forget() == ()
    for step in (1, 2):
        assert delivery.accept(facts_of(step))
        assert (delivery.forget(), delivery.committed_step) == ((step,), 3)
    with pytest.raises(StepOutOfOrder, match="5"):
        delivery.accept(facts_of(5))
    assert delivery.accept(facts_of(4)), "whoever sends knows that the third is committed"
    assert delivery.forget() == ()
    sent = [decisions(delivery, rank)[-1] for rank in delivery.ranks.values()]
    assert [one.step for one in sent if isinstance(one, Send)] == [4, 4]
    with pytest.raises(StepOutOfOrder):
        delivery.accept(facts_of(6))


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
