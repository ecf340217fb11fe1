"""Peers of the feed that keep no rule: floods without reading, commits of what was never sent."""

from collections.abc import Iterator

import pytest
import zmq

from sideband.feed.delivery import Delivery
from sideband.feed.errors import RankRefused
from sideband.feed.frames import encode_message
from sideband.feed.limits import PEER_QUEUE_MAX, STEP_MAX
from sideband.feed.messages import (
    PongMessage,
)
from sideband.feed.router import Router
from tests.unit.feed.delivery_builders import PLAN, facts_of


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
