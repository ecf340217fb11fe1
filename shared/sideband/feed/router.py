"""The feed's ROUTER socket, never blocking. Foreign errors (zmq) end here.

Not thread-safe: one owner. ``fd`` becomes readable when the socket's state changes, and only then:
after any ``send`` the owner must ``receive`` until there is nothing before it waits on it again.
"""

from collections.abc import Sequence
from typing import Final

import zmq

from sideband.errors import FeedError
from sideband.feed.curve import Doorman, HandshakeWatch
from sideband.feed.frames import Frame
from sideband.feed.keys import FeedKeys
from sideband.feed.limits import HEADER_BYTES_MAX, MESSAGE_FRAMES_MAX, PEER_QUEUE_MAX
from sideband.feed.ready import ReadyFrame

EXCESS_PER_CALL_MAX: Final = 16  # frames too many that go at a time, some microseconds each
CLOSE_LINGER_MS: Final = 500  # last answers get out; a rank that is gone cannot hold us up
# Plain integers: pyzmq's flags are enums, and joining two costs more than sending a short frame.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK) | int(zmq.SNDMORE)


class Router:
    """Bound from the start. ``bound_endpoint`` tells the port where ``endpoint`` left it open.

    With ``keys`` only holders of a key in their folder get in. ``denials`` tells who did not.
    Raises BadKeyFile, CurveUnavailable, or zmq.ZMQError for an address that cannot be bound.
    """

    def __init__(self, endpoint: str, *, keys: FeedKeys | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._doorman: Doorman | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self.denials = HandshakeWatch(self._socket)
        self._has_excess = False  # the next frames belong to a message that was given already
        try:
            if keys is not None:
                self._doorman = Doorman(self._context, keys)
                self._doorman.guard(self._socket)
            self._bind(endpoint)
        except (zmq.ZMQError, FeedError):
            self.close()
            raise
        self.bound_endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.fd = int(self._socket.getsockopt(zmq.FD))

    def _bind(self, endpoint: str) -> None:
        socket = self._socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a lost message is an error, not silence
        socket.setsockopt(zmq.MAXMSGSIZE, HEADER_BYTES_MAX)  # ranks send no bodies
        socket.setsockopt(zmq.SNDHWM, PEER_QUEUE_MAX)
        socket.bind(endpoint)

    def receive(self) -> list[Frame] | None:
        """The connection and the frames of one message; None when there is nothing now.

        Of a message of too many frames one too many is given, which shows that it is wrong. The
        rest goes in the calls that follow, a few frames in each: they return an empty list.
        """
        frames: list[Frame] = []
        count = EXCESS_PER_CALL_MAX if self._has_excess else 1 + MESSAGE_FRAMES_MAX + 1
        try:
            for _ in range(count):
                frame = self._socket.recv(_NOBLOCK, copy=False)
                if not self._has_excess:
                    frames.append(frame.buffer)
                if not frame.more:
                    break
        except zmq.Again:  # of a message all has come when its first frame has
            return None
        self._has_excess = bool(frame.more)
        return frames

    def send(self, connection: bytes, frames: Sequence[Frame | ReadyFrame]) -> bool:
        """False when nobody is there any more, or does not take what is sent.

        Credit bounds what a rank has coming, far below the queue's bound: only a peer that asks
        and never reads the answers comes to it.
        """
        socket = self._socket
        try:
            socket.send(connection, _MORE)
            for frame in frames[:-1]:
                socket.send(frame, _MORE)
            socket.send(frames[-1], _NOBLOCK)
        except zmq.ZMQError as exc:
            if exc.errno not in {zmq.EHOSTUNREACH, zmq.EAGAIN}:
                raise
            return False
        return True

    def close(self) -> None:
        """Blocks until the last answers are out, at most ``CLOSE_LINGER_MS``."""
        self.denials.close()
        self._socket.close(linger=CLOSE_LINGER_MS)
        if self._doorman is not None:
            self._doorman.close()
        self._context.term()


def receive_frames(socket: "zmq.Socket[bytes]") -> list[Frame]:
    """One message, nothing of it copied. Raises zmq.Again when there is none now.

    A frame knows whether another follows; asking the socket, as ``recv_multipart`` does after each
    frame, takes as long as receiving it.
    """
    frame = socket.recv(_NOBLOCK, copy=False)
    frames: list[Frame] = [frame.buffer]
    while frame.more:
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame.buffer)
    return frames
