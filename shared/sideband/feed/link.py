"""One thread, one DEALER socket, one session: a rank's connection to the feed.

The trainer's threads wait on ``wait`` and act through ``act``; both hold the one lock.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import zmq

from sideband.errors import FeedError, SidebandError
from sideband.feed.dealer import Dealer
from sideband.feed.errors import FeedClosed, FeedTimeout
from sideband.feed.frames import encode_message
from sideband.feed.keys import LoadedRankKeys
from sideband.feed.messages import Header
from sideband.feed.session import RankSession

POLL_S: Final = 0.05  # how late a repeat or a sign of life may be
LINGER_S: Final = 1.0  # for BYE; a feed that is gone cannot take it
JOIN_TIMEOUT_S: Final = 5.0

T = TypeVar("T")


class RankLink:
    """Owns the socket's thread. ``start`` begins to greet; ``close`` says goodbye and joins."""

    def __init__(
        self, endpoint: str, session: RankSession, *, keys: LoadedRankKeys | None = None
    ) -> None:
        self.endpoint, self._keys = endpoint, keys
        self._session = session
        self._denial = ""  # why the last handshake failed
        self._changed = threading.Condition()
        self._outgoing: list[Header] = []
        self._is_closing = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="sideband-feed-link", daemon=True)

    def start(self) -> None:
        """Begin to greet the feed. Once."""
        self._thread.start()

    def act(self, action: Callable[[RankSession], Sequence[Header]]) -> None:
        """Change the session and send what it answers, and what is due now."""
        with self._changed:
            self._outgoing.extend(action(self._session))
            has_news = bool(self._outgoing) or self._session.has_progress
            self._changed.notify_all()
        if has_news:
            self._wake()

    def look(self, read: Callable[[RankSession], T]) -> T:
        """Read something of the session."""
        with self._changed:
            return read(self._session)

    def wait(
        self,
        ready: Callable[[RankSession], T | None],
        what: str,
        *,
        timeout_s: float,
        is_final: bool = False,
    ) -> T:
        """Wait until ``ready`` gives something.

        Raises the session's error, FeedClosed, or FeedTimeout that names ``what``.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._is_closing and not is_final:
                    raise FeedClosed("the feed was closed")
                if self._session.error is not None and not is_final:
                    raise self._session.error
                found = ready(self._session)
                if found is not None:
                    return found
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise self._timeout(what, timeout_s)
                self._changed.wait(left_s)

    def _timeout(self, what: str, waited_s: float) -> FeedTimeout:
        session = self._session
        if session.welcome is None:
            why = _because(session.refusal or self._denial)
            what = f"{what} (no welcome from {self.endpoint} yet{why})"
        return FeedTimeout(what, waited_s=waited_s, waiting_for=session.waiting_for)

    def close(self) -> None:
        """Say goodbye, stop the thread and join it. Idempotent."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._outgoing.extend(self._session.goodbye())
            self._changed.notify_all()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(JOIN_TIMEOUT_S)
        self._wake_in.close()
        self._wake_out.close()

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"\0")
        except BlockingIOError:
            return  # as many wake-ups as fit are pending already
        except OSError:
            return  # closed meanwhile: there is nothing to wake

    def _run(self) -> None:
        try:
            self._exchange()
        finally:
            if not self._is_closing:  # whoever waits must not wait for a thread that died of a bug
                self.fail(FeedError("the thread of the feed's connection has crashed"), step=None)

    def _exchange(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = Dealer(context, self.endpoint, self._keys)
        try:
            while True:
                now_s = time.monotonic()
                dealer.heal(now_s=now_s)
                with self._changed:
                    is_closing, self._denial = self._is_closing, dealer.denial
                    is_silent = self._session.is_silent(now_s=now_s)
                    if is_silent:
                        self._session.rejoin(now_s=now_s)
                if is_silent:  # a half-open connection looks alive for minutes: make a new one
                    dealer.reconnect()
                self._send_all(dealer)
                if is_closing:
                    return
                dealer.wait(POLL_S, or_fd=self._wake_out.fileno())
                self._forget_wakes()
                self._receive_all(dealer)
        finally:
            dealer.close(linger_s=LINGER_S)
            context.term()

    def _send_all(self, dealer: Dealer) -> None:
        with self._changed:
            headers = [*self._outgoing, *self._session.due(now_s=time.monotonic())]
            self._outgoing.clear()
        for header in headers:
            if not dealer.send(encode_message(header)):
                with self._changed:  # what matters is repeated after the next hello
                    self._session.on_unsent(now_s=time.monotonic())
                return

    def _forget_wakes(self) -> None:
        try:
            while self._wake_out.recv(4096):
                pass
        except BlockingIOError:
            return

    def _receive_all(self, dealer: Dealer) -> None:
        received, fault = dealer.receive()
        if received:
            with self._changed:  # once for all of them: the trainer's threads want it too
                now_s = time.monotonic()
                for header, body in received:
                    self._outgoing += self._session.on_message(header, body, now_s=now_s)
                self._changed.notify_all()
        if fault is not None:
            self.fail(fault, step=None)

    def fail(self, error: SidebandError, *, step: int | None) -> None:
        """Raise ``error`` at whoever waits, and let the feed abort the step on all ranks."""

        def fail(session: RankSession) -> list[Header]:
            session.error = session.error or error
            at = session.at[0] if session.at is not None else 0
            return session.want_fail(at if step is None else step, str(error))

        self.act(fail)


def _because(refusal: str) -> str:
    return f", it said {refusal}" if refusal else ""
