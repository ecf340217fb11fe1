"""The feed's socket: moves frames between the ranks and ``Delivery``.

Runs on one event loop and never blocks it: a step is decoded, cut and encoded in a thread when it
comes, so that a message to a rank is bytes that are there. Tasks live in the task group of
``serving``.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sideband.feed.answers import Answerer
from sideband.feed.delivery import Delivery
from sideband.feed.errors import FeedFull, MalformedStep, OtherLineageStep
from sideband.feed.facts import Abort, Decision, End, Failure, GoneBack, RankState, Release, Send
from sideband.feed.frames import Frame, encode_message, with_release
from sideband.feed.keys import FeedKeys
from sideband.feed.limits import WAITING_FOR_MAX
from sideband.feed.messages import (
    AbortMessage,
    EndMessage,
    Header,
    ReleaseMessage,
)
from sideband.feed.observer import FeedObserver
from sideband.feed.outgoing import OutgoingStep, outgoing_step
from sideband.feed.ready import ReadyFrame
from sideband.feed.router import Router
from sideband.feed.waiting import blocking

TICK_S: Final = 0.5  # how late a lost rank may be noticed
FRAMES_PER_TURN_MAX: Final = 128  # then others on the loop get their turn
SENDS_PER_TURN_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class PutReceipt:
    """What became of a step: ``is_new`` is False for a repeat of what was taken before."""

    step: int
    digest: str
    micro_batch_count: int
    is_new: bool


class FeedServer:
    """Serves one run. Use its methods on the loop of ``serving``; ``delivery`` may be read there.

    ``endpoint`` is a ZMQ address; with a wildcard port ``bound_endpoint`` tells the real one. With
    ``keys`` only ranks that hold a key get in.
    """

    def __init__(
        self,
        delivery: Delivery,
        endpoint: str,
        *,
        keys: FeedKeys | None = None,
        observer: FeedObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.delivery, self._endpoint, self._clock = delivery, endpoint, clock
        self._keys = keys
        self._observer = observer or FeedObserver()
        self._answerer = Answerer(delivery, self._observer)
        self._steps: dict[int, OutgoingStep] = {}
        self._wake, self._drained = asyncio.Event(), asyncio.Event()
        self.bound_endpoint = ""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["FeedServer"]:
        """Bound and running inside; stopped and closed after. Once.

        Raises BadKeyFile, CurveUnavailable, or zmq.ZMQError for an address that cannot be bound.
        """
        self._router = await asyncio.to_thread(Router, self._endpoint, keys=self._keys)
        self.bound_endpoint = self._router.bound_endpoint
        loop = asyncio.get_running_loop()
        try:
            loop.add_reader(self._router.fd, self._wake.set)
            loop.add_reader(self._router.denials.fd, self._note_denials)
            self._note_denials()  # the descriptor tells nothing before the first look
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._exchange_all()),
                    group.create_task(self._tick_all()),
                ]
                try:
                    yield self
                finally:
                    for task in tasks:
                        task.cancel()
        finally:
            loop.remove_reader(self._router.fd)
            loop.remove_reader(self._router.denials.fd)
            await asyncio.to_thread(self._router.close)

    # --- for the service -------------------------------------------------------------------

    async def put(self, body: bytes, *, step: int, lineage: int | None = None) -> PutReceipt:
        """Take a step. Idempotent for equal bodies.

        ``lineage`` is the delivery's from before ``body`` was received, by default that of now.
        Raises MalformedStep, UnreadableStep or a StepRefused, with nothing changed.
        """
        lineage = self.delivery.lineage.number if lineage is None else lineage
        outgoing = await asyncio.to_thread(outgoing_step, body, lineage=lineage)
        facts = outgoing.facts
        if facts.step != step:
            raise MalformedStep("step", f"is {facts.step}, the address says {step}")
        if lineage != self.delivery.lineage.number:
            raise OtherLineageStep(step, lineage=lineage, expected=self.delivery.lineage.number)
        try:
            is_new = self.delivery.accept(facts)
        except FeedFull as exc:
            ranks = blocking(self.delivery)[:WAITING_FOR_MAX]
            if ranks:
                self._observer.intake_blocked(ranks)
            raise FeedFull(step, held=exc.held, blocking=ranks) from exc
        if is_new:
            self._steps[step] = outgoing
            self._observer.step_accepted(step, micro_batch_count=facts.count, body_bytes=len(body))
            self._forget()  # a rank may have committed it before this feed was restarted
            self.wake()
        return PutReceipt(step, facts.digest, facts.count, is_new)

    def end(self) -> None:
        """No more steps: ranks get END after the last. Idempotent."""
        self.delivery.held.is_ended = True
        self._forget()
        self.wake()

    def reopen(self) -> None:
        """More steps will come after all; who was told END must be started again. Idempotent."""
        self.delivery.held.is_ended = False
        for rank in self.delivery.ranks.values():
            rank.is_end_told = False
        self._drained.clear()
        self.wake()

    def go_back(self, to: GoneBack) -> tuple[int, ...]:
        """The trainer went back: the steps that were dropped. Idempotent. Raises LineageConflict.

        Every process of before gets ABORT; new ones go on after ``to.step``.
        """
        dropped = self.delivery.go_back(to)
        for step in dropped:
            del self._steps[step]
        if not self.delivery.is_drained:
            self._drained.clear()
        self._forget()
        self.wake()
        return dropped

    async def drained(self, *, timeout_s: float) -> bool:
        """Wait until the feed has ended and every rank has committed everything."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        return self.delivery.is_drained

    def pause(self, *, is_paused: bool) -> None:
        """Take and send nothing while paused; what is on the way arrives, commits count."""
        self.delivery.held.is_paused = is_paused
        self.wake()

    def wake(self) -> None:
        """Look again what there is to send."""
        self.delivery.stir_all()
        self._wake.set()

    # --- tasks -----------------------------------------------------------------------------

    async def _exchange_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            is_busy = True
            while is_busy:
                received = self._receive_turn()
                sent = await self._send_all()
                # Ends when there was nothing to receive and nothing was sent since: see Router.
                is_busy = received + sent > 0
                await asyncio.sleep(0)

    def _receive_turn(self) -> int:
        """Take what has come; the number of messages."""
        count = 0
        while count < FRAMES_PER_TURN_MAX and (message := self._router.receive()) is not None:
            count += 1
            if not message:
                continue  # the rest of one that was answered
            connection, *frames = message
            connection = bytes(connection)
            failure = self.delivery.failure
            for header in self._answerer.answers(connection, frames, now_s=self._clock()):
                self._send(connection, header)
            self._note_failure(before=failure)
        if count:
            self._forget()
        return count

    async def _tick_all(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            failure = self.delivery.failure
            for rank in self.delivery.tick(now_s=self._clock()):
                self._observer.rank_left(rank, is_lost=True)
            self._note_failure(before=failure)
            self._forget()
            self.wake()

    def _note_denials(self) -> None:
        """All that there are: the descriptor tells of new ones only."""
        while denials := self._router.denials.take():
            for reason, count in denials.items():
                self._observer.peers_denied(reason, count)

    def _note_failure(self, *, before: Failure | None) -> None:
        failure = self.delivery.failure
        if failure is not None and failure is not before:
            self._observer.step_failed(failure.step, rank=failure.rank, reason=failure.reason)

    def _forget(self) -> None:
        for step in self.delivery.forget():
            del self._steps[step]
            self._observer.step_committed(step)
        if self.delivery.is_drained:
            self._drained.set()

    async def _send_all(self) -> int:
        """Every decision that there is now; sending never blocks, and credit bounds it."""
        sent = 0
        for rank in self.delivery.stirred():
            while (decision := self.delivery.next_for(rank)) is not None:
                self._carry_out(rank, decision)
                sent += 1
                if sent % SENDS_PER_TURN_MAX == 0:
                    await asyncio.sleep(0)
        return sent

    def _carry_out(self, rank: RankState, decision: Decision) -> None:
        connection = rank.connection
        assert connection is not None, "absent ranks get no decisions"
        match decision:
            case Send():
                self._send_micro_batch(rank, connection, decision)
            case Release(place):
                self._send(connection, ReleaseMessage(step=place[0], index=place[1]))
            case Abort(step, reason):
                self._send(connection, AbortMessage(step=step, reason=reason))
            case End(last_step):
                self._send(connection, EndMessage(last_step=last_step))

    def _send_micro_batch(self, rank: RankState, connection: bytes, send: Send) -> None:
        frame = self._steps[send.step].frames[rank.dp_rank][send.index][rank.cp_rank]
        if self._send_frames(connection, with_release(frame, send.released)):
            self._observer.micro_batch_sent(rank, step=send.step, sent_bytes=len(frame))

    def _send(self, connection: bytes, header: Header) -> None:
        self._send_frames(connection, encode_message(header))

    def _send_frames(self, connection: bytes, frames: Sequence[Frame | ReadyFrame]) -> bool:
        """False when nobody is there any more: the rank will say hello."""
        if self._router.send(connection, frames):
            return True
        rank = self.delivery.leave(connection)
        if rank is not None:
            self._observer.rank_left(rank, is_lost=True)
        return False
