"""Feeds and ranks that die: real processes and sockets, named ends, and progress afterwards."""

import multiprocessing
import os
import signal
import threading
from functools import partial
from multiprocessing.connection import Connection

import pytest
import zmq

from sideband.errors import FeedError
from sideband.feed.committer import StepCommitter
from sideband.feed.errors import (
    FeedClosed,
    FeedTimeout,
    MalformedFrame,
    RankRefused,
    StepFailed,
    WrongProcess,
)
from sideband.feed.frames import encode_message
from sideband.feed.link import RankLink
from sideband.feed.messages import (
    CommittedMessage,
    HelloMessage,
)
from sideband.feed.rank import RankFeed
from sideband.feed.session import RankSession
from tests.unit.feed.builders import make_step
from tests.unit.feed.live import WAIT_S, in_parallel, live_feed, plan_of, read_all

STEPS = [make_step(step=s, form=None, model=None, dp_size=1, cp_size=2) for s in (1, 2, 3)]


def one_step_process(endpoint: str, told: Connection) -> None:
    """Trains one step as rank 1, says so, and hangs."""
    with RankFeed(endpoint, dp_rank=0, cp_rank=1, threads=1) as feed:
        for step in feed:
            list(step)
            step.commit()
            told.send(step.step)
            threading.Event().wait(60)


def test_a_killed_rank_is_named_and_its_successor_goes_on_after_its_commit() -> None:
    with live_feed(plan_of(STEPS[0], peer_timeout_s=2.0)) as feed:
        for step in STEPS:
            feed.put(step)
        feed.do(lambda server: server.end())
        survivor = feed.rank(0, 0)
        told, tell = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(
            target=one_step_process, args=(feed.bound, tell), daemon=True
        )
        process.start()
        try:
            thread = threading.Thread(target=read_all, args=(survivor,))
            thread.start()
            assert told.poll(WAIT_S * 3)
            assert told.recv() == 1
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            feed.until(lambda delivery: delivery.ranks[1].connection is None)
            assert feed.do(lambda server: server.delivery.waiting_for()) == (1,)
            seen = read_all(feed.rank(0, 1))
            thread.join(WAIT_S)
        finally:
            process.kill()
            process.join(WAIT_S)
        assert {step for step, *_ in seen} == {2, 3}
        feed.until(lambda delivery: delivery.is_drained)


def test_ranks_go_on_when_the_feed_is_restarted_and_gets_its_steps_again() -> None:
    with live_feed(plan_of(STEPS[0])) as first:
        address = first.bound
        ranks = [RankFeed(address, dp_rank=0, cp_rank=cp, threads=1, peer_timeout_s=1.5,
                          step_timeout_s=WAIT_S) for cp in range(2)]  # fmt: skip
        for step in STEPS[:2]:
            first.put(step)
        in_parallel([partial(take_step, rank) for rank in ranks])
    with live_feed(plan_of(STEPS[0]), endpoint=address) as second:
        second.ranks.extend(ranks)
        for step in STEPS[1:]:
            second.put(step)
        second.do(lambda server: server.end())
        seen = in_parallel([partial(read_all, rank) for rank in ranks])
        assert [{step for step, *_ in one} for one in seen] == [{2, 3}, {2, 3}]
        second.until(lambda delivery: delivery.is_drained)


def take_step(rank: RankFeed) -> None:
    step = next(iter(rank))
    list(step)
    step.commit()
    rank._current = None  # the next loop begins with the next step


def test_a_commit_without_a_feed_is_a_named_timeout() -> None:
    with live_feed(plan_of(STEPS[0])) as feed:
        ranks = [feed.rank(0, cp, commit_timeout_s=0.3) for cp in range(2)]
        feed.put(STEPS[0])
        in_parallel([partial(RankFeed.next_micro_batch, rank) for rank in ranks])
        feed.ranks.clear()
        feed.close()
        with pytest.raises(FeedTimeout, match="the confirmation of step 1"):
            ranks[0].commit(1)
        for rank in ranks:
            rank.close()


def test_another_process_commits_for_its_rank() -> None:
    with live_feed(plan_of(STEPS[0])) as feed:
        feed.put(STEPS[0])
        for cp in range(2):
            with StepCommitter(feed.bound, run_id="run-a", global_rank=cp) as committer:
                committer.commit(1)
        feed.until(lambda delivery: delivery.committed_step == 1)


def test_a_committer_names_what_went_wrong() -> None:
    with live_feed(plan_of(STEPS[0])) as feed:
        feed.put(STEPS[0])
        assert_commit_raises(feed.bound, RankRefused, "other_run", run_id="run-b")
        ranks = [feed.rank(0, cp) for cp in range(2)]
        feed.until(lambda delivery: delivery.is_open)
        ranks[1]._link.fail(FeedError("burnt"), step=1)
        feed.until(lambda delivery: delivery.failure is not None)
        assert_commit_raises(feed.bound, StepFailed, "burnt")
        with pytest.raises(StepFailed, match="burnt"):
            ranks[0].next_micro_batch()
    assert_commit_raises(feed.bound, FeedTimeout, "the confirmation of step 1 from")


def assert_commit_raises(
    endpoint: str, kind: type[FeedError], text: str, *, run_id: str = "run-a"
) -> None:
    committer = StepCommitter(endpoint, run_id=run_id, global_rank=0, commit_timeout_s=1.0)
    with committer, pytest.raises(kind, match=text):
        committer.commit(1)


def fake_feed(context: "zmq.Context[zmq.Socket[bytes]]") -> "tuple[zmq.Socket[bytes], str]":
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    return router, f"tcp://127.0.0.1:{port}"


def test_a_committer_waits_for_its_own_step_and_refuses_nonsense() -> None:
    with zmq.Context() as context:
        router, address = fake_feed(context)

        def answer() -> None:
            name = router.recv_multipart()[0]
            for step in (3, 4):
                router.send_multipart([name, *encode_message(CommittedMessage(step=step))])
            router.send_multipart([router.recv_multipart()[0], b"junk", b""])

        thread = threading.Thread(target=answer)
        thread.start()
        with StepCommitter(address, run_id="run-a", global_rank=0) as committer:
            committer.commit(4)
            with pytest.raises(MalformedFrame):
                committer.commit(5)
        thread.join(WAIT_S)
        router.close()


def test_a_feed_that_speaks_nonsense_is_named() -> None:
    with zmq.Context() as context:
        router, address = fake_feed(context)
        rank = RankFeed(address, dp_rank=0, cp_rank=0, threads=1)
        name = router.recv_multipart()[0]
        router.send_multipart([name, b"SB\x04\x63", b""])
        with pytest.raises(MalformedFrame, match="type 99 does not exist"):
            rank.next_micro_batch()
        rank.close()
        router.close()


def test_a_silent_feed_gets_a_new_connection_and_a_new_hello() -> None:
    """A half-open connection looks alive for minutes: silence counts, not the socket."""
    with zmq.Context() as context:
        router, address = fake_feed(context)
        rank = RankFeed(address, dp_rank=0, cp_rank=0, threads=1, peer_timeout_s=0.3)
        names: set[bytes] = set()
        router.rcvtimeo = int(WAIT_S * 1000)
        while len(names) < 3:
            names.add(router.recv_multipart()[0])
        rank.close()
        router.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crashed_thread_is_raised_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(RankLink, "_exchange", crash)
    rank = RankFeed("tcp://127.0.0.1:9", dp_rank=0, cp_rank=0, threads=1)
    with rank, pytest.raises(FeedError, match="connection has crashed"):
        rank.next_micro_batch()
    monkeypatch.undo()
    monkeypatch.setattr("sideband.feed.assembly.decode_chunk", crash)
    step = make_step(form=None, model=None, dp_size=1, cp_size=1)
    with live_feed(plan_of(step)) as feed:
        feed.put(step)
        with pytest.raises(FeedError, match="assembling thread crashed"):
            feed.rank(0, 0).next_micro_batch()
        feed.until(lambda delivery: delivery.failure is not None)


def test_a_link_that_never_started_closes() -> None:
    hello = HelloMessage(instance="p", dp_rank=0, cp_rank=0, credit=1)
    link = RankLink("tcp://127.0.0.1:9", RankSession(hello=hello, peer_timeout_s=1))
    link.close()
    link.close()
    link.act(lambda _: [])  # a late wake-up of a closed link is nothing
    with pytest.raises(FeedClosed):
        link.wait(lambda _: None, "nothing", timeout_s=1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_rank_feed_in_a_fork_is_a_named_error_and_not_a_hang() -> None:
    step = make_step(step=1, form=None, model=None, dp_size=1, cp_size=1)
    with live_feed(plan_of(step)) as feed:
        rank = feed.rank(0, 0)
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            os._exit(named_uses(rank))
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 4
        feed.put(step)
        feed.do(lambda server: server.end())
        assert len(read_all(rank)) == step.micro_batch_count


def named_uses(rank: RankFeed) -> int:
    """How many ways to use the feed end in the named error; closing it does nothing."""
    named = 0
    for use in (
        lambda: next(iter(rank)),
        lambda: rank.commit(1),
        lambda: rank.run_id,
        lambda: rank.committed_step,
    ):
        try:
            use()
        except WrongProcess as exc:
            named += exc.made_in == os.getppid()
    rank.close()
    return named
