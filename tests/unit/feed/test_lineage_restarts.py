"""Real ranks that outlive both a going back and the feed: refused by name, and given nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import zmq

from sideband.feed.committer import StepCommitter
from sideband.feed.errors import RankRefused
from sideband.feed.facts import GoneBack
from sideband.feed.frames import decode_message
from sideband.feed.messages import FROM_FEED, RefusedMessage
from sideband.feed.rank import RankFeed
from tests.unit.feed.builders import make_step
from tests.unit.feed.live import WAIT_S, LiveFeed, in_parallel, live_feed, plan_of, read_all

STEPS = [make_step(step=number, form=None, model=None, cp_size=2) for number in (1, 2, 3, 4)]
GRID = [(dp, cp) for dp in range(STEPS[0].dp_size) for cp in range(2)]
WENT_BACK = GoneBack(lineage=1, step=1, last_step=4)
Seen = list[tuple[int, int, str]]


@contextmanager
def feed_at(endpoint: str = "tcp://127.0.0.1:*") -> Iterator[LiveFeed]:
    """A feed whose ranks outlive it."""
    with live_feed(plan_of(STEPS[0], peer_timeout_s=1.0), endpoint=endpoint) as feed:
        yield feed
        feed.ranks.clear()


def ranks_at(feed: LiveFeed, committed_step: int | None = None) -> list[RankFeed]:
    return [feed.rank(*place, committed_step=committed_step, peer_timeout_s=1.0) for place in GRID]


def take(feed: RankFeed, count: int) -> Seen:
    """The next steps, committed."""
    seen = []
    for step in islice(feed, count):
        seen += [(batch.step, batch.index, batch.digest()) for batch in step]
        step.commit()
    return seen


def all_take(ranks: list[RankFeed], count: int) -> list[Seen]:
    return in_parallel([partial(take, rank, count) for rank in ranks])


@pytest.fixture
def before() -> Iterator[tuple[str, list[RankFeed], list[Seen]]]:
    """Ranks that trained two of three steps, without their feed now; what they got."""
    with feed_at() as feed:
        ranks = ranks_at(feed)
        for step in STEPS[:3]:
            feed.put(step)
        first = all_take(ranks, 2)
        endpoint = feed.bound
    yield endpoint, ranks, first
    for rank in ranks:
        rank.close()


def everybody_joined(feed: LiveFeed) -> None:
    feed.until(lambda delivery: delivery.is_open)


def tell(feed: LiveFeed) -> None:
    feed.do(lambda server: server.go_back(WENT_BACK))


@pytest.mark.parametrize("is_told_first", [True, False])
def test_ranks_of_before_are_refused_and_new_ones_get_the_steps_again(
    before: tuple[str, list[RankFeed], list[Seen]], is_told_first: bool
) -> None:
    endpoint, old, first = before
    with feed_at(endpoint) as feed:
        if not is_told_first:
            everybody_joined(feed)
        tell(feed)
        for step in STEPS[1:]:
            feed.put(step)
        for rank in old:
            while (batch := step_or_refusal(rank)) is not None:
                assert batch == 3, "what came from the feed of before is all there is"
            assert rank.committed_step == 2
        assert feed.do(lambda server: dict(server.delivery.committed)) == {}
        new = ranks_at(feed, committed_step=1)
        feed.do(lambda server: server.end())
        second = in_parallel([partial(read_all, rank) for rank in new])
        feed.until(lambda delivery: delivery.is_drained)
        for rank in new:
            rank.close()
    assert [[s for s in rank if s[0] == 2] for rank in second] == [
        [s for s in rank if s[0] == 2] for rank in first
    ]
    assert [{s[0] for s in rank} for rank in second] == [{2, 3, 4}] * len(GRID)


def step_or_refusal(rank: RankFeed) -> int | None:
    """The step of what the rank still has in its queue; None once it hears the refusal."""
    try:
        batch = rank.next_micro_batch()
    except RankRefused as refusal:
        assert refusal.code == "other_lineage", str(refusal)  # noqa: PT017
        assert "the trainer went back to step 1" in refusal.reason  # noqa: PT017
        return None
    assert batch is not None
    return batch.step


def test_ranks_of_the_lineage_go_on_over_a_restart_of_the_feed() -> None:
    with feed_at() as feed:
        feed.put(STEPS[0])
        tell(feed)
        trained = ranks_at(feed, committed_step=1)
        for step in STEPS[1:3]:
            feed.put(step)
        first = all_take(trained, 1)
        endpoint = feed.bound
    trained[0].close()
    with feed_at(endpoint) as feed:
        dp, cp = GRID[0]
        ranks = [feed.rank(dp, cp, committed_step=2, peer_timeout_s=1.0), *trained[1:]]
        everybody_joined(feed)
        tell(feed)
        for step in STEPS[2:]:
            feed.put(step)
        feed.do(lambda server: server.end())
        second = in_parallel([partial(read_all, rank) for rank in ranks])
        feed.until(lambda delivery: delivery.is_drained)
        for rank in ranks:
            rank.close()
    assert [{s[0] for s in rank} for rank in first] == [{2}] * len(GRID)
    assert [{s[0] for s in rank} for rank in second] == [{3, 4}] * len(GRID)


def test_a_committer_of_before_commits_nothing() -> None:
    with live_feed(plan_of(STEPS[0])) as feed:
        feed.put(STEPS[0])
        tell(feed)
        feed.put(STEPS[1])
        ranks = ranks_at(feed, committed_step=1)
        batches = in_parallel([rank.next_micro_batch for rank in ranks])
        assert {batch.lineage for batch in batches if batch is not None} == {1}
        with StepCommitter(feed.bound, run_id="run-a", global_rank=0) as committer:
            with pytest.raises(RankRefused, match="other_lineage: is of lineage 0"):
                committer.commit(2, lineage=0)
            committer.commit(2, lineage=1)
        assert feed.do(lambda server: server.delivery.committed[0]) == 2


def test_a_rank_of_an_earlier_protocol_hears_both_versions() -> None:
    golden = (Path(__file__).parents[2] / "golden" / "feed-messages-v3.txt").read_text()
    hello = next(line for line in golden.splitlines() if line.startswith("hello-shortest "))
    with live_feed(plan_of(STEPS[0])) as feed, zmq.Context() as context:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        dealer.connect(feed.bound)
        dealer.send_multipart([bytes.fromhex(frame) for frame in hello.split(" ")[1:]])
        header, _ = decode_message(dealer.recv_multipart(), FROM_FEED)
        dealer.close(linger=0)
    assert header == RefusedMessage(
        code="unsupported_protocol", reason="feed protocol 3 is not spoken here, only 4"
    )
