"""Peers of the feed that keep no rule: floods without reading, commits of what was never sent."""

import contextlib
from collections.abc import Iterator

import pytest
import zmq

from sideband.feed.delivery import Delivery
from sideband.feed.errors import RankRefused
from sideband.feed.frames import decode_message, encode_message
from sideband.feed.limits import HEADER_BYTES_MAX, MESSAGE_FRAMES_MAX, PEER_QUEUE_MAX, STEP_MAX
from sideband.feed.messages import (
    FROM_FEED,
    PingMessage,
    PongMessage,
    RefusedMessage,
    ResyncMessage,
)
from sideband.feed.router import EXCESS_PER_CALL_MAX, Router
from tests.unit.feed.delivery_builders import PLAN, facts_of
from tests.unit.feed.live import WAIT_S, LiveFeed

FRAMES_TOO_MANY = 1000


@contextlib.contextmanager
def dealer(endpoint: str) -> Iterator["zmq.Socket[bytes]"]:
    """A peer's socket."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.setsockopt(zmq.RCVTIMEO, int(1e3 * WAIT_S))
    try:
        peer.connect(endpoint)
        yield peer
    finally:
        peer.close()
        context.term()


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router("tcp://127.0.0.1:*")
    yield router
    router.close()


def test_a_peer_that_never_reads_gets_a_bounded_queue(router: Router) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.RCVHWM, 1)
    peer.setsockopt(zmq.RCVBUF, 4096)
    peer.setsockopt(zmq.LINGER, 0)
    try:
        peer.connect(router.bound_endpoint)
        peer.send(b"hi")
        message = None
        while message is None:
            message = router.receive()
        connection = bytes(message[0])
        pong = encode_message(PongMessage(waiting_for=tuple(range(16))))
        # What the system's own buffers take comes on top.
        taken = next((n for n in range(1_000_000) if not router.send(connection, pong)), None)
        assert taken is not None
        assert taken >= PEER_QUEUE_MAX
        assert router.send(b"nobody", pong) is False
    finally:
        peer.close()
        context.term()


def test_a_message_of_very_many_frames_is_let_go_a_few_at_a_time(router: Router) -> None:
    """One that is taken whole holds the feed's loop for as long as its frames take."""
    ping = encode_message(PingMessage(global_rank=0))
    with dealer(router.bound_endpoint) as peer:
        peer.send_multipart([b"x"] * FRAMES_TOO_MANY)
        peer.send_multipart(ping)
        message = None
        while message is None:
            message = router.receive()
        assert [bytes(frame) for frame in message[1:]] == [b"x"] * (MESSAGE_FRAMES_MAX + 1)
        turns = 0
        while (message := router.receive()) is None or not message:
            turns += message is not None
        rest = FRAMES_TOO_MANY - MESSAGE_FRAMES_MAX - 1
        assert turns == -(-rest // EXCESS_PER_CALL_MAX)
        assert [bytes(frame) for frame in message[1:]] == ping


@pytest.mark.parametrize("over", [0, 1])
def test_a_frame_that_is_too_large_ends_its_peers_connection(router: Router, over: int) -> None:
    """No header of a rank comes near the bound; beyond it a peer would fill the feed's memory."""
    size = HEADER_BYTES_MAX + over
    with (
        dealer(router.bound_endpoint) as peer,
        peer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as watch,
    ):
        peer.send(b"x" * size)
        deadline = zmq.Poller()
        deadline.register(router.fd, zmq.POLLIN)
        deadline.register(watch, zmq.POLLIN)
        while (message := router.receive()) is None and not watch.poll(0):
            assert deadline.poll(int(1e3 * WAIT_S)), "nothing came of it"
        assert (message is None) is bool(over)
        if message is not None:
            assert len(message[1]) == size
        peer.disable_monitor()


def test_the_feed_refuses_a_message_of_very_many_frames_once_and_goes_on() -> None:
    feed = LiveFeed(PLAN)
    try:
        with dealer(feed.bound) as peer:
            ping = encode_message(PingMessage(global_rank=0))
            peer.send_multipart([ping[0]] * FRAMES_TOO_MANY)
            peer.send_multipart(ping)
            refused, _ = decode_message(peer.recv_multipart(), FROM_FEED)
            answer, _ = decode_message(peer.recv_multipart(), FROM_FEED)
    finally:
        feed.close()
    assert isinstance(refused, RefusedMessage)
    assert refused.reason == "message frame: has 3 frames or more, must have 2 frames"
    assert isinstance(answer, ResyncMessage)


def test_a_commit_of_a_step_that_was_never_sent_is_refused() -> None:
    """Recorded, it would let the files of that step go before anybody has read them."""
    delivery = Delivery(PLAN)
    delivery.held.accept(facts_of(1))
    for step in (STEP_MAX, 1 + PLAN.steps_held_max + 1):
        with pytest.raises(RankRefused, match="the last step that came is 1"):
            delivery.commit(0, step)
    assert not delivery.committed
    # One that an earlier feed of the run may have sent counts.
    assert delivery.commit(0, 1 + PLAN.steps_held_max) is None
