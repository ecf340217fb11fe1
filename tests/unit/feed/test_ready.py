"""A frame that libzmq owns: sent again and again, and nothing in Python waits for it."""

import sys

import zmq
from zmq.utils.garbage import gc as keeper

from sideband.feed.ready import ready_frame
from sideband.feed.router import Router

LARGE_BYTES = 1 << 17  # pyzmq copies what is smaller than half of it


def test_what_a_ready_frame_was_made_of_is_not_kept() -> None:
    data = bytes(range(256)) * (LARGE_BYTES // 256)
    references = sys.getrefcount(data)
    frame = ready_frame(data)
    assert frame.bytes == data
    assert sys.getrefcount(data) == references
    assert len(ready_frame(b"")) == 0


def test_a_ready_frame_is_sent_often_and_nothing_waits_for_its_end() -> None:
    data = bytes(range(256)) * (LARGE_BYTES // 256)
    frame, kept = ready_frame(data), len(keeper.refs)
    router = Router("tcp://127.0.0.1:*")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    try:
        peer.setsockopt(zmq.RCVTIMEO, 10_000)
        peer.connect(router.bound_endpoint)
        peer.send(b"hi")
        message = None
        while message is None:
            message = router.receive()
        for _ in range(3):
            assert router.send(bytes(message[0]), [frame, b"release"])
        assert len(keeper.refs) == kept
        assert [peer.recv_multipart() for _ in range(3)] == [[data, b"release"]] * 3
    finally:
        peer.close(linger=0)
        context.term()
        router.close()
