"""A trainer that says what its checkpoint holds, and the feed that knows what the run took back."""

import json
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest

from sideband.errors import InvalidInput
from sideband.feed.delivery import Delivery
from sideband.feed.errors import RankRefused
from sideband.feed.facts import GoneBack, Hello
from sideband.feed.messages import CommittedMessage, HelloMessage, ResyncMessage
from sideband.feed.rank import RankFeed
from sideband.feed.resume import ResumePoint, restored_point
from sideband.feed.session import RankSession
from tests.unit.feed.builders import make_step
from tests.unit.feed.delivery_builders import PLAN, decisions, facts_of, hello_of
from tests.unit.feed.live import LiveFeed, in_parallel, live_feed, plan_of
from tests.unit.feed.test_session import batch, give, welcomed

KEPT: dict[str, object] = {"run_id": "run-a", "lineage": 2, "step": 7}
WRONG: list[tuple[object, str]] = [
    ({"lineage": 2, "step": 7}, "missing required field `run_id`"),
    ({**KEPT, "step": -1}, "`int` >= 0"),
    ({**KEPT, "step": "7"}, "Expected `int`, got `str`"),
    ({**KEPT, "lineage": None}, "Expected `int`, got `null`"),
    ({**KEPT, "run_id": "a/b"}, "regex"),
    ({**KEPT, "model": 1}, "unknown field `model`"),
    (7, "must be what a checkpoint kept"),
]


@pytest.mark.parametrize(("kept", "rule"), WRONG)
def test_what_no_feed_gave_is_refused_when_the_rank_is_made(kept: Any, rule: str) -> None:
    with pytest.raises(InvalidInput, match=rule) as caught:
        RankFeed("tcp://127.0.0.1:9", dp_rank=0, cp_rank=0, resume=kept)
    assert caught.value.field == "resume"


@pytest.mark.parametrize(
    ("options", "field"),
    [({"run_id": "run-b"}, "run_id"), ({"committed_step": 6}, "committed_step")],
)
def test_a_trainer_that_says_something_else_besides_is_refused(
    options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInput, match="as resume says") as caught:
        RankFeed("tcp://127.0.0.1:9", dp_rank=0, cp_rank=0, resume=KEPT, **options)
    assert caught.value.field == field
    point = restored_point(KEPT, run_id="run-a", committed_step=7)
    assert point is not None
    assert (point.run_id, point.lineage, point.step) == ("run-a", 2, 7)


def restored(lineage: int | None, step: int) -> Hello:
    """The hello of a new process with such a checkpoint."""
    hello = hello_of(0, instance=f"new-{lineage}-{step}")
    return replace(hello, committed_step=step, committed_lineage=lineage, resume=(step + 1, 0))


def gone_back_twice() -> Delivery:
    """To step 2 and to step 4; of the second lineage two more steps were sent, up to 6."""
    delivery = Delivery(replace(PLAN, steps_held_max=8))
    delivery.go_back(GoneBack(lineage=2, step=4, last_step=4, earlier=((1, 2),)))
    for step in (5, 6):
        delivery.held.accept(facts_of(step, count=1, plan=delivery.plan))
    for index in range(2):
        hello = replace(hello_of(index), committed_step=4)
        delivery.hello(b"c%d" % index, hello, now_s=0.0)
    for rank in delivery.stirred():
        assert decisions(delivery, rank)
    delivery.leave(b"c0")
    return delivery


@pytest.mark.parametrize(
    ("lineage", "step", "refusal"),
    [
        (0, 5, "went_back: holds step 5 of lineage 0, of which the run holds steps up to 2: the "
               "trainer went back to step 4"),
        (1, 6, "went_back: holds step 6 of lineage 1, of which the run holds steps up to 4: the "
               "trainer went back to step 4"),
        (3, 4, "other_lineage: holds step 4 of lineage 3, the run is at lineage 2"),
        (2, 7, "went_back: committed step 7, but the trainer went back to step 4"),
        (0, 3, "went_back: holds step 3 of lineage 0, of which the run holds steps up to 2: the "
               "trainer went back to step 4"),
        (1, 4, None),
        (2, 4, None),
        (2, 6, None),
        (None, 6, None),  # by its number: it does not say more
    ],
)  # fmt: skip
def test_a_checkpoint_counts_by_the_lineage_of_its_step(
    lineage: int | None, step: int, refusal: str | None
) -> None:
    delivery = gone_back_twice()
    if refusal is None:
        assert delivery.hello(b"n", restored(lineage, step), now_s=1.0).next == (step + 1, 0)
        return
    with pytest.raises(RankRefused) as caught:
        delivery.hello(b"n", restored(lineage, step), now_s=1.0)
    assert str(caught.value) == refusal
    assert caught.value.retry_after_s is None


def test_an_earlier_checkpoint_of_an_earlier_lineage_is_of_the_run() -> None:
    delivery = Delivery(PLAN)
    delivery.go_back(GoneBack(lineage=2, step=4, last_step=4, earlier=((1, 2),)))
    for lineage, step in ((0, 2), (0, 1), (1, 3)):
        delivery.hello(b"n", restored(lineage, step), now_s=1.0)
        delivery.leave(b"n")


def test_a_feed_that_is_not_told_yet_judges_a_checkpoint_when_it_is() -> None:
    delivery = Delivery(PLAN)
    delivery.hello(b"n", restored(0, 3), now_s=0.0)
    delivery.go_back(GoneBack(lineage=1, step=2, last_step=9))
    assert delivery.rank_of(b"n", now_s=0.1) is None, "RESYNC"
    with pytest.raises(RankRefused, match="went_back: holds step 3 of lineage 0"):
        delivery.hello(b"n", restored(0, 3), now_s=0.2)


def greeting(rank: RankSession, *, now_s: float) -> HelloMessage:
    (hello,) = rank.due(now_s=now_s)
    assert isinstance(hello, HelloMessage)
    return hello


def test_a_process_says_the_lineage_of_what_it_committed_last() -> None:
    hello = HelloMessage(
        instance="p", dp_rank=0, cp_rank=0, credit=2, committed_step=2, committed_lineage=0
    )
    rank = RankSession(hello=hello, peer_timeout_s=10.0)
    assert greeting(rank, now_s=0.0).committed_lineage == 0
    welcomed(rank, now_s=1.0)
    give(rank, batch(3, 0, count=1, lineage=5))
    give(rank, ResyncMessage(), now_s=2.0)
    again = greeting(rank, now_s=3.0)
    assert (again.committed_step, again.committed_lineage, again.lineage) == (2, 0, 5)
    welcomed(rank, now_s=4.0)
    rank.want_commit(3)
    give(rank, CommittedMessage(step=3))
    give(rank, ResyncMessage(), now_s=5.0)
    again = greeting(rank, now_s=6.0)
    assert (again.committed_step, again.committed_lineage, again.lineage) == (3, 5, 5)


STEPS = [make_step(step=number, form=None, model=None, cp_size=2) for number in (1, 2, 3, 4)]
GRID = [(dp, cp) for dp in range(STEPS[0].dp_size) for cp in range(2)]


def train(feed: RankFeed, count: int) -> dict[int, str]:
    """So many steps; by step what a checkpoint after it keeps, as a file has it."""
    kept = {}
    for taken in islice(feed, count):
        for micro_batch in taken:
            assert micro_batch.resume_point == taken.resume_point
        kept[taken.step] = json.dumps(taken.resume_point)
        taken.commit()
    return kept


def ranks_from(feed: LiveFeed, kept: str, **options: Any) -> list[RankFeed]:
    point: ResumePoint = json.loads(kept)
    return [feed.rank(*place, resume=point, **options) for place in GRID]


def all_train(ranks: list[RankFeed], count: int) -> dict[int, str]:
    return in_parallel([partial(train, rank, count) for rank in ranks])[0]


def test_real_ranks_restart_from_what_is_of_the_run_and_from_nothing_else() -> None:
    with live_feed(plan_of(STEPS[0])) as feed:
        first = [feed.rank(*place) for place in GRID]
        for step in STEPS[:3]:
            feed.put(step)
        before = all_train(first, 3)
        assert json.loads(before[3]) == {"run_id": "run-a", "lineage": 0, "step": 3}
        feed.do(lambda server: server.go_back(GoneBack(lineage=1, step=1, last_step=3)))
        for step in STEPS[1:]:
            feed.put(step)
        second = ranks_from(feed, before[1])
        after = all_train(second, 2)
        assert json.loads(after[3]) == {"run_id": "run-a", "lineage": 1, "step": 3}
        for rank in second:
            rank.close()
        for number in (2, 3):  # it was reached again
            with pytest.raises(RankRefused, match=f"went_back: holds step {number} of lineage 0"):
                ranks_from(feed, before[number])[0].next_micro_batch()
        third = ranks_from(feed, after[3])
        assert set(all_train(third, 1)) == {4}


def test_a_checkpoint_of_another_run_is_refused() -> None:
    with live_feed(plan_of(STEPS[0])) as feed:
        other = json.dumps({"run_id": "run-b", "lineage": 0, "step": 0})
        with pytest.raises(RankRefused, match="other_run: this feed serves run-a, not run-b"):
            ranks_from(feed, other)[0].next_micro_batch()
