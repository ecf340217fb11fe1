"""A rank's socket to the feed: DEALER, its options, its keys, and why it was not let in.

Not thread-safe: one owner. Foreign errors (zmq) end here.
"""

from collections.abc import Sequence
from typing import Final

import zmq

from sideband.errors import SidebandError
from sideband.feed.curve import Denial, HandshakeWatch, secure_dealer
from sideband.feed.errors import MalformedFrame, UnsupportedProtocol
from sideband.feed.frames import Frame, decode_message
from sideband.feed.keys import LoadedRankKeys
from sideband.feed.limits import MICRO_BATCH_FRAME_BYTES_MAX
from sideband.feed.messages import FROM_FEED, Header
from sideband.feed.router import receive_frames

FRAMES_PER_TURN_MAX: Final = 64  # then commands and signs of life get their turn
RECONNECT_MS: Final = 50
RECONNECT_MS_MAX: Final = 1000
DENIED_AGAIN_S: Final = 1.0  # keys are exchanged by people
_DENIALS: Final[dict[Denial, str]] = {
    "key": "it does not let this rank's key in",
    "protocol": "they do not agree on keys: one has none, or the rank has another feed's",
    "handshake": "it hung up: do both have keys, and the rank those of this feed?",
}

Received = tuple[Header, Frame | None]


class Dealer:
    """Connected from the start. ZMQ connects again by itself, but not after it was denied: the
    owner calls ``heal`` now and then. ``denial`` is why the last handshake failed, in words."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, keys: LoadedRankKeys | None
    ) -> None:
        self._context, self._endpoint, self._keys = context, endpoint, keys
        self.denial = ""
        self._open()

    def _open(self) -> None:
        self._denied_s: float | None = None
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # what is said before there is a peer is repeated
        socket.setsockopt(zmq.MAXMSGSIZE, MICRO_BATCH_FRAME_BYTES_MAX)
        socket.setsockopt(zmq.RCVHWM, 0)  # bounded by credit
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        if self._keys is not None:
            secure_dealer(socket, self._keys)
        self._socket, self._watch = socket, HandshakeWatch(socket)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        socket.connect(self._endpoint)

    def reconnect(self) -> None:
        """A new connection; what the old one held is gone."""
        self.close()
        self._open()

    def heal(self, *, now_s: float) -> None:
        """Look whether the handshake was denied, and try again some time after."""
        for reason in self._watch.take():
            self.denial = _DENIALS[reason]
            self._denied_s = now_s if self._denied_s is None else self._denied_s
        if self._denied_s is not None and now_s >= self._denied_s + DENIED_AGAIN_S:
            self.reconnect()

    def wait(self, timeout_s: float, *, or_fd: int | None = None) -> None:
        """Until something came, ``or_fd`` is readable, or the time is over."""
        if or_fd is not None:
            self._poller.register(or_fd, zmq.POLLIN)
        self._poller.poll(max(1, int(timeout_s * 1000)))

    def send(self, frames: Sequence[Frame]) -> bool:
        """False without a connection, or when it takes nothing more."""
        try:
            self._socket.send_multipart(frames, flags=int(zmq.NOBLOCK))
        except zmq.Again:
            return False
        return True

    def receive(self) -> tuple[list[Received], SidebandError | None]:
        """The messages that have come, up to a bound or a broken one; chunks are not copied."""
        received: list[Received] = []
        try:
            while len(received) < FRAMES_PER_TURN_MAX:
                received.append(decode_message(receive_frames(self._socket), FROM_FEED))
        except zmq.Again:
            return received, None
        except (MalformedFrame, UnsupportedProtocol) as exc:
            return received, exc
        return received, None

    def close(self, *, linger_s: float = 0.0) -> None:
        """What was sent gets out for ``linger_s`` at most, while the context is terminated."""
        self._watch.close()
        self._socket.close(linger=int(linger_s * 1000))
