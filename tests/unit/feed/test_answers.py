"""What the feed answers to each message of a rank, refusals by code."""

from dataclasses import replace

import pytest

from sideband.feed.answers import Answerer
from sideband.feed.delivery import Delivery
from sideband.feed.frames import encode_message
from sideband.feed.messages import (
    AbortMessage,
    ByeMessage,
    CommitMessage,
    CommittedMessage,
    FailMessage,
    Header,
    HelloMessage,
    PingMessage,
    PongMessage,
    ProgressMessage,
    RefusedMessage,
    ResyncMessage,
    WelcomeMessage,
)
from sideband.feed.observer import FeedObserver
from tests.unit.feed.delivery_builders import PLAN, facts_of


class Feed:
    def __init__(self, delivery: Delivery | None = None) -> None:
        self.delivery = delivery or Delivery(PLAN)
        self._answerer = Answerer(self.delivery, FeedObserver())

    def say(self, header: Header, connection: bytes = b"c0") -> list[Header]:
        return self._answerer.answers(connection, encode_message(header), now_s=1.0)

    def frames(self, frames: list[bytes]) -> list[Header]:
        return self._answerer.answers(b"c0", frames, now_s=1.0)


def hello(rank: int = 0, **changes: object) -> HelloMessage:
    fields = {"instance": f"p{rank}", "dp_rank": 0, "cp_rank": rank, "credit": 2, **changes}
    return HelloMessage(**fields)  # type: ignore[arg-type]  # the tests' own fields


def code_of(answers: list[Header]) -> str:
    (refused,) = answers
    assert isinstance(refused, RefusedMessage)
    return refused.code


def test_a_hello_is_welcomed_with_its_rank_filled_in() -> None:
    (welcome,) = Feed().say(hello(1))
    assert isinstance(welcome, WelcomeMessage)
    assert (welcome.global_rank, welcome.rank_count, welcome.run_id) == (1, 2, "run")
    assert (welcome.dp_size, welcome.cp_size, welcome.committed_step) == (1, 2, None)


def test_with_siblings_a_rank_must_say_which_it_is() -> None:
    feed = Feed(Delivery(replace(PLAN, rank_count=4)))
    assert code_of(feed.say(hello(1))) == "unknown_rank"
    (welcome,) = feed.say(hello(1, global_rank=3))
    assert isinstance(welcome, WelcomeMessage)


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (hello(protocol=1), "unsupported_protocol"),
        (hello(run_id="another"), "other_run"),
        (hello(cp_rank=5), "unknown_rank"),
        (hello(global_rank=9), "unknown_rank"),
        (hello(credit=0), "malformed"),
        (CommitMessage(run_id="another", global_rank=0, step=1), "other_run"),
        (CommitMessage(run_id="run", global_rank=2, step=1), "unknown_rank"),
    ],
)
def test_a_refusal_has_its_code(header: Header, code: str) -> None:
    assert code_of(Feed().say(header)) == code


def test_frames_that_are_no_message_are_refused() -> None:
    assert code_of(Feed().frames([b"SB\x09\x01", b""])) == "unsupported_protocol"
    assert code_of(Feed().frames([b"junk"])) == "malformed"
    assert code_of(Feed().frames([])) == "malformed"


@pytest.mark.parametrize(
    "header",
    [
        ProgressMessage(seq=1, step=1, index=0),
        PingMessage(global_rank=0),
        FailMessage(run_id="run", global_rank=0, step=1, reason="disk"),
    ],
)
def test_an_unknown_connection_is_told_to_say_hello(header: Header) -> None:
    assert Feed().say(header) == [ResyncMessage()]


def test_a_ping_tells_who_is_waited_for() -> None:
    feed = Feed()
    feed.say(hello(0))
    assert feed.say(PingMessage(global_rank=0)) == [PongMessage(waiting_for=(1,))]


def test_progress_reaches_the_machine_without_an_answer() -> None:
    feed = Feed()
    feed.delivery.held.accept(facts_of(1))
    feed.say(hello(0))
    feed.say(hello(1), b"c1")
    feed.delivery.next_for(feed.delivery.ranks[0])
    assert feed.say(ProgressMessage(seq=1, step=1, index=1)) == []
    assert feed.delivery.ranks[0].seq_taken == 1
    assert feed.delivery.ranks[0].read == (1, 1)


def test_any_connection_may_commit_and_hears_of_a_failed_step() -> None:
    feed = Feed()
    commit = CommitMessage(run_id="run", global_rank=1, step=4)
    assert feed.say(commit, b"the committer") == [CommittedMessage(step=4)]
    assert feed.delivery.committed == {1: 4}
    feed.say(hello(0))
    assert feed.say(FailMessage(run_id="run", global_rank=0, step=4, reason="disk")) == []
    assert feed.say(commit, b"the committer") == [AbortMessage(step=4, reason="disk")]
    failed = FailMessage(run_id="another", global_rank=0, step=4, reason="disk")
    assert code_of(feed.say(failed)) == "other_run"


def test_goodbye_lets_another_process_in_at_once() -> None:
    feed = Feed()
    feed.say(hello(0))
    assert code_of(feed.say(hello(0, instance="next"), b"c1")) == "rank_in_use"
    assert feed.say(ByeMessage()) == []
    assert feed.say(ByeMessage()) == []
    assert isinstance(feed.say(hello(0, instance="next"), b"c1")[0], WelcomeMessage)
