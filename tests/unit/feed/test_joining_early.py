"""Ranks that are started before the feed knows that their trainer went back."""

import json
from dataclasses import replace

import pytest

from sideband.feed.delivery import Delivery
from sideband.feed.errors import FeedTimeout, RankRefused
from sideband.feed.facts import GoneBack
from tests.unit.feed.delivery_builders import PLAN, facts_of, hello_of
from tests.unit.feed.live import live_feed, plan_of
from tests.unit.feed.test_resume import GRID, STEPS, all_train, ranks_from


def test_steps_that_are_gone_are_waited_for_and_named_in_the_end() -> None:
    with live_feed(plan_of(STEPS[3])) as feed:
        feed.put(STEPS[3])
        kept = json.dumps({"run_id": "run-a", "lineage": 0, "step": 1})
        with pytest.raises(FeedTimeout, match=r"it said step_forgotten: wants step 2.* from 4"):
            ranks_from(feed, kept, join_timeout_s=0.7)[0].next_micro_batch()


def test_a_rank_that_joins_before_the_feed_is_told_goes_on_when_it_is() -> None:
    with live_feed(plan_of(STEPS[0])) as feed:
        first = [feed.rank(*place) for place in GRID]
        for step in STEPS[:3]:
            feed.put(step)
        before = all_train(first, 3)
        for rank in first:
            rank.close()
        second = ranks_from(feed, before[1])
        feed.until(lambda delivery: not any(r.connection for r in delivery.ranks.values()))
        for rank in second:  # refused as step_forgotten meanwhile
            rank._link.wait(lambda s: s.refusal or None, "a refusal", timeout_s=8)
        feed.do(lambda server: server.go_back(GoneBack(lineage=1, step=1, last_step=3)))
        for step in STEPS[1:]:
            feed.put(step)
        assert set(all_train(second, 3)) == {2, 3, 4}


def test_a_rank_that_got_nothing_yet_is_asked_again_when_the_trainer_goes_back() -> None:
    delivery = Delivery(PLAN)
    delivery.held.accept(facts_of(3, count=1))
    for rank in range(2):
        hello = replace(hello_of(rank), committed_step=2, credit=1)
        delivery.hello(b"c%d" % rank, hello, now_s=0.0)
    (waiting,) = [r for r in delivery.stirred() if r.global_rank == 0]
    assert delivery.next_for(waiting) is not None, "step 3"
    delivery.go_back(GoneBack(lineage=1, step=2, last_step=3))
    assert delivery.rank_of(b"c1", now_s=0.1) is None, "RESYNC"
    assert delivery.rank_of(b"c0", now_s=0.1) is waiting, "ABORT: it got a part of step 3"


def test_only_who_got_nothing_may_ask_again_for_steps_that_are_gone() -> None:
    delivery = Delivery(PLAN)
    delivery.held.accept(facts_of(3))
    hello = replace(hello_of(0), committed_step=1)
    for lineage, is_again in ((None, True), (0, False)):
        with pytest.raises(RankRefused, match="step_forgotten") as caught:
            delivery.hello(b"c", replace(hello, lineage=lineage), now_s=0.0)
        assert (caught.value.retry_after_s is not None) == is_again
