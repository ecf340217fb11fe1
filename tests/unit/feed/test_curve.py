"""CURVE over real sockets: holders of a key are served, all others get nothing and are counted."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator

from sideband.errors import InvalidInput
from sideband.feed.committer import StepCommitter
from sideband.feed.curve import Doorman, is_local
from sideband.feed.errors import BadKeyFile, CurveUnavailable, FeedTimeout
from sideband.feed.frames import encode_message
from sideband.feed.keys import FeedKeys, RankKeys, make_keys, read_pair, read_public
from sideband.feed.messages import CommitMessage, HelloMessage
from sideband.feed.rank import RankFeed
from sideband.feed.router import Router
from tests.unit.feed.builders import make_step
from tests.unit.feed.live import WAIT_S, LiveFeed, in_parallel, live_feed, plan_of, read_all

STEP = make_step(form=None, model=None, dp_size=1, cp_size=2)
HELLO = HelloMessage(instance="intruder", dp_rank=0, cp_rank=0, credit=1)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with the feed's keys, and with two of ranks."""
    make_keys(tmp_path, ["rank", "other"])
    return tmp_path


def feed_keys(folder: Path) -> FeedKeys:
    return FeedKeys(feed_key=folder / "feed.key_secret", ranks_dir=folder / "ranks")


def rank_keys(folder: Path, name: str = "rank", *, feed: Path | None = None) -> RankKeys:
    return RankKeys(feed_key=feed or folder / "feed.key", rank_key=folder / f"{name}.key_secret")


def stranger(folder: Path) -> RankKeys:
    """Knows the feed's public key; its own lies in another folder."""
    make_keys(folder / "elsewhere")
    return rank_keys(folder / "elsewhere", feed=folder / "feed.key")


@contextmanager
def intruder(endpoint: str, keys: RankKeys | None) -> "Iterator[zmq.Socket[bytes]]":
    """A peer that says hello and commits, with whatever keys it has."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        own = read_pair(keys.rank_key)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, read_public(keys.feed_key))
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    try:
        dealer.connect(endpoint)
        for header in (HELLO, CommitMessage(run_id="run-a", global_rank=0, step=1)):
            dealer.send_multipart(encode_message(header))
        yield dealer
    finally:
        dealer.close()
        context.term()


def until_denied(feed: LiveFeed, *reasons: str) -> None:
    """Of two sides that do not agree on CURVE either may hang up first."""
    feed.until(lambda _: feed.observer.denied.total() > 0)
    assert set(feed.observer.denied) <= set(reasons)


def assert_got_nothing(feed: LiveFeed, dealer: "zmq.Socket[bytes]") -> None:
    assert dealer.poll(0) == 0
    assert feed.do(lambda server: (server.delivery.ranks, server.delivery.committed)) == ({}, {})


def test_ranks_with_keys_get_their_steps_and_commit(keys: Path) -> None:
    with live_feed(plan_of(STEP), keys=feed_keys(keys)) as feed:
        feed.put(STEP)
        feed.do(lambda server: server.end())
        ranks = [
            feed.rank(0, cp, keys=rank_keys(keys, name))
            for cp, name in enumerate(["rank", "other"])
        ]
        seen = in_parallel([partial(read_all, rank) for rank in ranks])
        assert [len(one) for one in seen] == [STEP.micro_batch_count] * 2
        feed.until(lambda delivery: delivery.is_drained)
        assert not feed.observer.denied


def test_another_process_commits_with_the_keys_of_its_rank(keys: Path) -> None:
    with live_feed(plan_of(STEP), keys=feed_keys(keys)) as feed:
        feed.put(STEP)
        for cp in range(2):
            with StepCommitter(
                feed.bound, run_id="run-a", global_rank=cp, keys=rank_keys(keys)
            ) as committer:
                committer.commit(1)
        feed.until(lambda delivery: delivery.committed_step == 1)


def test_a_peer_without_keys_gets_nothing_and_is_counted(keys: Path) -> None:
    with live_feed(plan_of(STEP), keys=feed_keys(keys)) as feed:
        feed.put(STEP)
        with intruder(feed.bound, None) as dealer:
            until_denied(feed, "protocol", "handshake")
            assert_got_nothing(feed, dealer)


def test_a_peer_whose_key_is_not_in_the_folder_gets_nothing_and_is_counted(keys: Path) -> None:
    with live_feed(plan_of(STEP), keys=feed_keys(keys)) as feed:
        feed.put(STEP)
        with intruder(feed.bound, stranger(keys)) as dealer:
            until_denied(feed, "key")
            assert_got_nothing(feed, dealer)


def test_a_peer_that_means_another_feed_gets_nothing_and_is_counted(keys: Path) -> None:
    make_keys(keys / "elsewhere")
    wrong = rank_keys(keys, feed=keys / "elsewhere" / "feed.key")
    with (
        live_feed(plan_of(STEP), keys=feed_keys(keys)) as feed,
        intruder(feed.bound, wrong) as dealer,
    ):
        until_denied(feed, "protocol", "handshake")
        assert_got_nothing(feed, dealer)


def timeout_of(feed: LiveFeed, keys: RankKeys | None) -> str:
    """What a rank says that never gets in; it is waited for until it knows why."""
    rank = RankFeed(feed.bound, dp_rank=0, cp_rank=0, threads=1, join_timeout_s=1.0, keys=keys)
    with rank:
        until_denied(feed, "key", "protocol", "handshake")
        with pytest.raises(FeedTimeout) as caught:
            rank.next_micro_batch()
    return str(caught.value)


def test_a_rank_that_is_not_let_in_says_why(keys: Path) -> None:
    with live_feed(plan_of(STEP), keys=feed_keys(keys)) as feed:
        assert "does not let this rank's key in" in timeout_of(feed, stranger(keys))
    with live_feed(plan_of(STEP), keys=feed_keys(keys)) as feed:
        assert "keys" in timeout_of(feed, None)
        committer = StepCommitter(feed.bound, run_id="run-a", global_rank=0, commit_timeout_s=0.5)
        with committer, pytest.raises(FeedTimeout, match="keys"):
            committer.commit(1)
    with live_feed(plan_of(STEP)) as feed:
        assert "keys" in timeout_of(feed, rank_keys(keys))


def test_a_key_that_comes_later_lets_its_rank_in_without_a_restart(keys: Path) -> None:
    late = stranger(keys)
    step = make_step(form=None, model=None, dp_size=1, cp_size=1)
    with live_feed(plan_of(step), keys=feed_keys(keys)) as feed:
        feed.put(step)
        rank = feed.rank(0, 0, keys=late)
        until_denied(feed, "key")
        public = keys / "elsewhere" / "ranks" / "rank.key"
        public.rename(keys / "ranks" / "late.key")
        assert rank.next_micro_batch() is not None


def test_nobody_gets_in_without_the_doorman(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadAuthenticator, "start", lambda _: None)
    router = Router("tcp://127.0.0.1:*", keys=feed_keys(keys))
    try:
        with intruder(router.bound_endpoint, rank_keys(keys)) as dealer:
            found = 0
            for _ in range(int(WAIT_S * 100)):
                assert router.receive() is None
                if found := router.denials.take().total():
                    break
                dealer.poll(10)
            assert found
    finally:
        router.close()


def test_a_feed_does_not_start_with_keys_that_it_cannot_trust(keys: Path) -> None:
    for path in (keys / "feed.key_secret", keys / "ranks"):
        before = path.stat().st_mode
        path.chmod(0o777)
        with pytest.raises(BadKeyFile):
            Router("tcp://127.0.0.1:*", keys=feed_keys(keys))
        path.chmod(before)
    with pytest.raises(BadKeyFile):
        Router("tcp://127.0.0.1:*", keys=feed_keys(keys / "nowhere"))
    Router("tcp://127.0.0.1:*", keys=feed_keys(keys)).close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if "Authentication" in name]


def test_keys_without_curve_in_the_system_are_refused(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq, "has", lambda what: what != "curve")
    with zmq.Context() as context, pytest.raises(CurveUnavailable):
        Doorman(context, feed_keys(keys))
    with pytest.raises(CurveUnavailable):
        RankFeed("tcp://127.0.0.1:9", dp_rank=0, cp_rank=0, keys=rank_keys(keys))


@pytest.mark.parametrize(
    ("endpoint", "is_here"),
    [
        ("tcp://127.0.0.1:5600", True),
        ("tcp://127.9.9.9:*", True),
        ("tcp://[::1]:5600", True),
        ("tcp://localhost:5600", True),
        ("ipc:///run/feed", True),
        ("tcp://0.0.0.0:5600", False),
        ("tcp://*:5600", False),
        ("tcp://[::]:5600", False),
        ("tcp://feed:5600", False),
        ("tcp://eth0:5600", False),
        ("tcp://10.0.0.7:5600", False),
        ("tcp://127.0.0.1.evil.example:5600", False),
        ("tcp://10.0.0.7:0;127.0.0.1:5600", False),
    ],
)
def test_loopback_is_told_from_beyond(endpoint: str, is_here: bool) -> None:
    assert is_local(endpoint) is is_here


def test_beyond_loopback_a_rank_needs_keys_unless_it_says_otherwise(keys: Path) -> None:
    places: list[Any] = [
        lambda **more: RankFeed("tcp://feed:5600", dp_rank=0, cp_rank=0, threads=1, **more),
        lambda **more: StepCommitter("tcp://feed:5600", run_id="run-a", global_rank=0, **more),
    ]
    for make in places:
        with pytest.raises(InvalidInput, match="beyond loopback"):
            make()
        make(keys=rank_keys(keys)).close()
        make(plain_beyond_loopback=True).close()
    with pytest.raises(BadKeyFile):
        places[0](keys=rank_keys(keys / "nowhere"))
