"""A rank's side of the protocol, message by message, without a socket."""

import pytest

from sideband.feed.errors import MalformedFrame, RankRefused, StepFailed, StepMissing
from sideband.feed.messages import (
    AbortMessage,
    ByeMessage,
    CommitMessage,
    CommittedMessage,
    EndMessage,
    FailMessage,
    Header,
    HelloMessage,
    MicroBatchMessage,
    PingMessage,
    PongMessage,
    ProgressMessage,
    RefusedMessage,
    ReleaseMessage,
    ResyncMessage,
    WelcomeMessage,
)
from sideband.feed.session import RankSession


def session(
    *, run_id: str | None = None, committed: int | None = None, credit: int = 2
) -> RankSession:
    hello = HelloMessage(
        instance="p", run_id=run_id, dp_rank=0, cp_rank=0, credit=credit, committed_step=committed
    )
    return RankSession(hello=hello, peer_timeout_s=10.0)


WELCOME = WelcomeMessage(
    run_id="run", global_rank=5, dp_size=1, cp_size=1, layout="contiguous", rank_count=1,
    generation=1,
)  # fmt: skip


def welcomed(
    rank: RankSession, *, now_s: float = 0.0, committed: int | None = None
) -> list[Header]:
    rank.due(now_s=now_s)
    welcome = WelcomeMessage(**{**as_fields(WELCOME), "committed_step": committed})
    return rank.on_message(welcome, None, now_s=now_s)


def as_fields(header: Header) -> dict:  # type: ignore[type-arg]  # fields of any header
    return {name: getattr(header, name) for name in header.__struct_fields__}


def batch(
    step: int, index: int, *, count: int = 2, run_id: str = "run", lineage: int = 0
) -> Header:
    return MicroBatchMessage(
        run_id=run_id, lineage=lineage, step=step, index=index, count=count, fields=()
    )


def give(rank: RankSession, header: Header, *, now_s: float = 0.0) -> list[Header]:
    body = b"chunk" if isinstance(header, MicroBatchMessage) else None
    return rank.on_message(header, body, now_s=now_s)


def test_it_greets_until_it_is_welcomed_and_then_shows_life() -> None:
    rank = session()
    (hello,) = rank.due(now_s=0)
    assert isinstance(hello, HelloMessage)
    assert (hello.committed_step, hello.resume_step) == (None, None)
    assert rank.due(now_s=0.5) == []
    assert rank.due(now_s=1.0) == [hello]
    rank.greet_soon(now_s=1.1)
    assert rank.due(now_s=1.2) == [hello]
    welcomed(rank, now_s=1.3)
    assert rank.due(now_s=1.4) == [PingMessage(run_id="run", global_rank=5)]
    assert rank.due(now_s=1.5) == []
    assert rank.run_id == "run"


def told(rank: RankSession, *, now_s: float = 0.5) -> list[Header]:
    """What it says of its progress now."""
    return [header for header in rank.due(now_s=now_s) if isinstance(header, ProgressMessage)]


def test_micro_batches_arrive_in_order_and_what_is_read_is_said_at_once() -> None:
    rank = session()
    welcomed(rank)
    for place in [(3, 0), (3, 1), (4, 0)]:
        assert give(rank, batch(*place)) == []
    assert rank.at == (4, 1)
    arrived = rank.take()
    assert (arrived.message.step, arrived.body) == (3, b"chunk")
    rank.note_read((3, 1))
    assert rank.has_progress
    assert told(rank) == [ProgressMessage(seq=1, step=3, index=1)]
    assert not rank.has_progress
    assert told(rank) == []
    rank.take()
    rank.note_read((4, 0))
    rank.take()
    rank.note_read((4, 1))
    assert told(rank) == [ProgressMessage(seq=3, step=4, index=1)]  # one message for both


@pytest.mark.parametrize(("credit", "taken"), [(1, 1), (2, 1), (3, 2), (8, 4), (9, 5)])
def test_credit_goes_back_when_half_of_it_was_taken(credit: int, taken: int) -> None:
    rank = session(credit=credit)
    welcomed(rank)
    for index in range(credit):
        give(rank, batch(3, index, count=99))
    for _ in range(taken - 1):
        rank.take()
        assert told(rank) == []
    rank.take()
    assert told(rank) == [ProgressMessage(seq=taken, step=0, index=0)]


def test_what_did_not_get_out_is_said_again() -> None:
    rank = session()
    welcomed(rank)
    give(rank, batch(3, 0))
    rank.take()
    rank.note_read((3, 1))
    progress = [ProgressMessage(seq=1, step=3, index=1)]
    assert told(rank) == progress
    rank.on_unsent(now_s=0.6)
    assert told(rank) == progress
    assert told(rank) == []


def test_a_reconnected_rank_says_where_it_is_and_what_it_has_read() -> None:
    rank = session()
    welcomed(rank)
    give(rank, batch(3, 0))
    rank.note_read((3, 1))
    give(rank, ResyncMessage(), now_s=1)
    rank.note_read((3, 1))
    assert not rank.has_progress  # nobody would understand it now
    (hello,) = rank.due(now_s=1.2)
    assert isinstance(hello, HelloMessage)
    assert (hello.resume_step, hello.resume_index) == (3, 1)
    assert welcomed(rank, now_s=1.3) == []
    assert told(rank, now_s=1.4) == [ProgressMessage(seq=0, step=3, index=1)]
    rank.take()
    assert told(rank, now_s=1.5) == []  # its sequence number belongs to the earlier welcome
    give(rank, batch(3, 1))
    rank.take()
    assert told(rank, now_s=1.6) == [ProgressMessage(seq=1, step=3, index=1)]


def test_a_repeat_is_dropped_and_a_lost_message_makes_it_join_again() -> None:
    rank = session()
    welcomed(rank)
    give(rank, batch(3, 0))
    assert give(rank, batch(3, 0)) == []
    assert len(rank.arrived) == 1
    assert told(rank) == [ProgressMessage(seq=2, step=0, index=0)]
    give(rank, batch(4, 1), now_s=2)
    assert rank.at == (3, 1)
    assert isinstance(rank.due(now_s=2.1)[0], HelloMessage)
    assert give(rank, batch(3, 1)) == []  # still of the old order
    assert len(rank.arrived) == 1
    welcomed(rank, now_s=3)
    give(rank, batch(3, 1))
    give(rank, batch(4, 0))
    assert rank.at == (4, 1)
    assert rank.error is None


@pytest.mark.parametrize(("committed", "first"), [(2, (4, 0)), (None, (3, 1))])
def test_a_jump_is_missed_loudly(committed: int | None, first: tuple[int, int]) -> None:
    rank = session(committed=committed)
    welcomed(rank)
    headers = give(rank, batch(*first))
    assert isinstance(rank.error, StepMissing)
    assert isinstance(headers[0], FailMessage)


def test_the_feed_s_memory_of_commits_is_taken_over() -> None:
    rank = session()
    welcomed(rank, committed=7)
    assert (rank.committed, rank.at) == (7, (8, 0))


def test_a_commit_is_repeated_until_it_is_confirmed() -> None:
    rank = session()
    welcomed(rank)
    rank.due(now_s=0)
    commit = CommitMessage(run_id="run", global_rank=5, step=3)
    assert rank.want_commit(3) == [commit]
    assert commit in rank.due(now_s=1.5)
    give(rank, CommittedMessage(step=2))
    assert commit in rank.due(now_s=3)
    give(rank, CommittedMessage(step=3))
    assert commit not in rank.due(now_s=5)
    assert rank.committed == 3
    give(rank, ResyncMessage(), now_s=6)
    assert rank.want_commit(4) == []
    assert CommitMessage(run_id="run", global_rank=5, step=4) in welcomed(rank, now_s=7)


def test_a_failure_is_repeated_until_the_abort() -> None:
    rank = session()
    assert rank.want_fail(3, "disk") == []
    fail = FailMessage(run_id="run", global_rank=5, step=3, reason="disk")
    assert welcomed(rank) == [fail]
    assert fail in rank.due(now_s=1.5)
    give(rank, AbortMessage(step=3, reason="disk"))
    assert isinstance(rank.error, StepFailed)
    assert fail not in rank.due(now_s=3)


def test_refusals_end_it_or_make_it_ask_again() -> None:
    rank = session()
    rank.due(now_s=0)
    give(rank, RefusedMessage(code="rank_in_use", reason="held", retry_after_s=3.0), now_s=0)
    assert rank.refusal == "rank_in_use: held"
    assert rank.due(now_s=2) == []
    assert isinstance(rank.due(now_s=3)[0], HelloMessage)
    give(rank, RefusedMessage(code="other_run", reason="no"))
    assert isinstance(rank.error, RankRefused)
    assert rank.due(now_s=99) == []


def test_a_feed_of_another_run_is_refused() -> None:
    rank = session(run_id="mine")
    welcomed(rank)
    assert isinstance(rank.error, RankRefused)
    changed = session()
    welcomed(changed)
    changed.on_message(WelcomeMessage(**{**as_fields(WELCOME), "run_id": "next"}), None, now_s=1)
    assert isinstance(changed.error, RankRefused)


@pytest.mark.parametrize("wrong", [batch(3, 2), batch(3, 0, run_id="other")])
def test_a_micro_batch_that_cannot_be_is_an_error(wrong: Header) -> None:
    rank = session()
    welcomed(rank)
    assert give(rank, wrong) == []
    assert isinstance(rank.error, MalformedFrame)
    assert not rank.arrived


def test_a_rank_is_of_the_lineage_of_the_first_micro_batch_that_it_takes() -> None:
    rank = session(committed=2)
    (greeting,) = rank.due(now_s=0)
    assert isinstance(greeting, HelloMessage)
    assert greeting.lineage is None
    welcomed(rank)
    give(rank, batch(2, 1, lineage=1))  # a repeat is dropped
    assert rank.lineage is None
    give(rank, batch(3, 0, count=1, lineage=2))
    assert rank.want_commit(3) == [CommitMessage(run_id="run", global_rank=5, step=3, lineage=2)]
    give(rank, ResyncMessage(), now_s=1)
    (again,) = rank.due(now_s=2)
    assert isinstance(again, HelloMessage)
    assert (again.lineage, again.committed_step) == (2, 2)


def test_a_micro_batch_of_another_lineage_is_never_handed_over() -> None:
    rank = session()
    welcomed(rank)
    give(rank, batch(3, 0, lineage=1))
    rank.take()
    give(rank, batch(3, 1, lineage=2))
    assert isinstance(rank.error, RankRefused)
    assert rank.error.code == "other_lineage"
    assert str(rank.error) == ("other_lineage: got lineage 1, the feed sends lineage 2 now")
    assert not rank.arrived


def test_releases_ends_and_pongs_are_shown() -> None:
    rank = session()
    welcomed(rank)
    give(rank, ReleaseMessage(step=3, index=1))
    give(rank, ReleaseMessage(step=3, index=0))  # never back
    assert rank.released == (3, 1)
    give(rank, MicroBatchMessage(run_id="run", lineage=0, step=3, index=0, count=2, fields=(),
                                 released=(3, 2)))  # fmt: skip
    assert rank.released == (3, 2)
    give(rank, PongMessage(waiting_for=(2,)))
    assert rank.waiting_for == (2,)
    give(rank, EndMessage(last_step=3))
    assert rank.is_ended


def test_silence_is_measured_from_the_last_message() -> None:
    rank = session()
    assert not rank.is_silent(now_s=100)
    assert rank.is_silent(now_s=111)
    rank.rejoin(now_s=111)
    assert not rank.is_silent(now_s=112)
    welcomed(rank, now_s=115)
    assert not rank.is_silent(now_s=125)
    assert rank.is_silent(now_s=126)


def test_only_a_welcomed_rank_says_goodbye() -> None:
    rank = session()
    assert rank.goodbye() == []
    welcomed(rank)
    assert rank.goodbye() == [ByeMessage()]
