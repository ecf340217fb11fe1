"""Thirty-two ranks in one thread: they take, answer and commit, and decode nothing."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from bench.feed.workload import CP_SIZE, RANKS, FeedShape
from sideband.feed.curve import secure_dealer
from sideband.feed.facts import after
from sideband.feed.frames import Frame, decode_message, encode_message
from sideband.feed.keys import RankKeys
from sideband.feed.messages import (
    FROM_FEED,
    HelloMessage,
)
from sideband.feed.router import receive_frames
from sideband.feed.session import RankSession

Dealer = zmq.Socket[bytes]
POLL_MS = 60_000
CREDIT = 8  # as RankFeed has it
MICRO_BATCH = 35  # the type, behind magic and version


class FeedStood(RuntimeError):
    """Nothing came for a minute."""


@dataclass(frozen=True, slots=True)
class Received:
    """What all ranks got, and how long it took from the first greeting on."""

    seconds: float
    body_bytes: int
    messages: int


def receive_feed(endpoint: str, shape: FeedShape, keys: RankKeys | None = None) -> Received:
    """Every rank's whole part of the protocol: credit, read, commit."""
    with zmq.Context() as context:
        dealers = [_dealer(context, endpoint, keys) for _ in range(RANKS)]
        sessions = [_session(rank) for rank in range(RANKS)]
        begin, body_bytes, messages = time.perf_counter(), 0, 0
        for dealer, session in zip(dealers, sessions, strict=True):
            _send_due(dealer, session)
        places = {dealer: place for place, dealer in enumerate(dealers)}
        poller = _poller(dealers)
        while any((session.committed or 0) < shape.steps for session in sessions):
            for dealer in _readable(poller):
                session = sessions[places[dealer]]
                for frames in _arrived(dealer):
                    if frames[0][3] == MICRO_BATCH:
                        body_bytes += len(frames[0])
                        messages += 1
                    _on_frames(dealer, session, frames)
                _send_due(dealer, session)
        seconds = time.perf_counter() - begin
        for dealer in dealers:
            dealer.close(linger=0)
    return Received(seconds, body_bytes, messages)


def _on_frames(dealer: Dealer, session: RankSession, frames: list[Frame]) -> None:
    header, body = decode_message(frames, FROM_FEED)
    answers = session.on_message(header, body, now_s=time.monotonic())
    while session.arrived:
        message = session.take().message
        place = after((message.step, message.index), message.count)
        session.note_read(place)
        if place[1] == 0:
            answers += session.want_commit(message.step)
    for answer in answers:
        dealer.send_multipart(encode_message(answer))


def receive_raw(endpoint: str, *, messages_per_step: int) -> Received:
    """The same sockets; one acknowledgement per rank and step, no credit."""
    with zmq.Context() as context:
        dealers = [_dealer(context, endpoint) for _ in range(RANKS)]
        begin, body_bytes, messages = time.perf_counter(), 0, 0
        for rank, dealer in enumerate(dealers):
            dealer.send(str(rank).encode())
        counts = dict.fromkeys(dealers, 0)
        poller, open_ranks = _poller(dealers), RANKS
        while open_ranks:
            for dealer in _readable(poller):
                for [body] in _arrived(dealer):
                    if not body:
                        open_ranks -= 1
                        continue
                    body_bytes += len(body)
                    messages += 1
                    counts[dealer] += 1
                    if counts[dealer] % messages_per_step == 0:
                        dealer.send(b"done")
        seconds = time.perf_counter() - begin
        for dealer in dealers:
            dealer.close(linger=0)
    return Received(seconds, body_bytes, messages)


def _dealer(context: "zmq.Context[Dealer]", endpoint: str, keys: RankKeys | None = None) -> Dealer:
    dealer = context.socket(zmq.DEALER)
    if keys is not None:
        secure_dealer(dealer, keys.load())
    dealer.setsockopt(zmq.RCVHWM, 0)
    dealer.connect(endpoint)
    return dealer


def _arrived(dealer: Dealer) -> Iterator[list[Frame]]:
    """The messages that are there now, not copied; as a rank receives them."""
    with contextlib.suppress(zmq.Again):
        while True:
            yield receive_frames(dealer)


def _session(rank: int) -> RankSession:
    hello = HelloMessage(
        instance=f"bench-{rank}", dp_rank=rank // CP_SIZE, cp_rank=rank % CP_SIZE, credit=CREDIT
    )
    return RankSession(hello=hello, peer_timeout_s=60.0)


def _send_due(dealer: Dealer, session: RankSession) -> None:
    for header in session.due(now_s=time.monotonic()):
        dealer.send_multipart(encode_message(header))


def _poller(dealers: list[Dealer]) -> zmq.Poller:
    poller = zmq.Poller()
    for dealer in dealers:
        poller.register(dealer, zmq.POLLIN)
    return poller


def _readable(poller: zmq.Poller) -> list[Dealer]:
    """The sockets that have something. Raises FeedStood."""
    events = poller.poll(POLL_MS)
    if not events:
        raise FeedStood(f"nothing came for {POLL_MS} ms")
    return [dealer for dealer, _ in events]
