"""The feed's socket: moves frames between the ranks and ``Delivery``.

Runs on one event loop and never blocks it: bodies are decoded, cut and encoded in threads. Tasks
live in the task group of ``serving``.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

import zmq
import zmq.asyncio

from sideband.batch.chunks import cut_chunk
from sideband.feed.answers import Answerer
from sideband.feed.codec import Step, decode_step, encode_chunk
from sideband.feed.delivery import Delivery
from sideband.feed.errors import MalformedStep
from sideband.feed.facts import Abort, Decision, End, RankState, Release, Send, StepFacts
from sideband.feed.limits import HEADER_BYTES_MAX
from sideband.feed.messages import (
    AbortMessage,
    EndMessage,
    Frame,
    Header,
    MicroBatchMessage,
    ReleaseMessage,
    encode_message,
)
from sideband.feed.observer import FeedObserver
from sideband.segments import Field

TICK_S: Final = 0.5  # how late a lost rank may be noticed
CLOSE_LINGER_MS: Final = 500  # last answers get out; a rank that is gone cannot hold us up


@dataclass(frozen=True, slots=True)
class PutReceipt:
    """What became of a step: ``is_new`` is False for a repeat of what was taken before."""

    step: int
    digest: str
    micro_batch_count: int
    is_new: bool


class FeedServer:
    """Serves one run. Use its methods on the loop of ``serving``; ``delivery`` may be read there.

    ``endpoint`` is a ZMQ address; with a wildcard port ``bound_endpoint`` tells the real one.
    """

    def __init__(
        self,
        delivery: Delivery,
        endpoint: str,
        *,
        observer: FeedObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.delivery, self._endpoint, self._clock = delivery, endpoint, clock
        self._observer = observer or FeedObserver()
        self._answerer = Answerer(delivery, self._observer)
        self._steps: dict[int, Step] = {}
        self._wake, self._drained = asyncio.Event(), asyncio.Event()
        self.bound_endpoint = ""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["FeedServer"]:
        """Bound and running inside; stopped and closed after. Once."""
        context = zmq.asyncio.Context()
        self._router: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        try:
            self._bind()
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._receive_all()),
                    group.create_task(self._send_all()),
                    group.create_task(self._tick_all()),
                ]
                try:
                    yield self
                finally:
                    for task in tasks:
                        task.cancel()
        finally:
            self._router.close(linger=CLOSE_LINGER_MS)
            await asyncio.to_thread(context.term)

    def _bind(self) -> None:
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a lost message is an error, not silence
        self._router.setsockopt(zmq.MAXMSGSIZE, HEADER_BYTES_MAX)  # ranks send no bodies
        self._router.setsockopt(zmq.SNDHWM, 0)  # bounded by credit
        self._router.bind(self._endpoint)
        self.bound_endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    # --- for the service -------------------------------------------------------------------

    async def put(self, body: bytes, *, step: int) -> PutReceipt:
        """Take a step. Idempotent for equal bodies.

        Raises MalformedStep, UnreadableStep or a StepRefused, with nothing changed.
        """
        digest, decoded = await asyncio.to_thread(_digest_and_decode, body)
        if decoded.step != step:
            raise MalformedStep("step", f"is {decoded.step}, the address says {step}")
        facts = StepFacts(
            run_id=decoded.run_id,
            step=step,
            count=decoded.micro_batch_count,
            digest=digest,
            dp_size=decoded.dp_size,
            cp_size=decoded.cp_size,
            layout=decoded.layout,
            model=decoded.model,
        )
        is_new = self.delivery.held.accept(facts)
        if is_new:
            self._steps[step] = decoded
            self._observer.step_accepted(step, micro_batch_count=facts.count, body_bytes=len(body))
            self._forget()  # a rank may have committed it before this feed was restarted
            self.wake()
        return PutReceipt(step, digest, facts.count, is_new)

    def end(self) -> None:
        """No more steps: ranks get END after the last. Idempotent."""
        self.delivery.held.is_ended = True
        self._forget()
        self.wake()

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
        self._wake.set()

    # --- tasks -----------------------------------------------------------------------------

    async def _receive_all(self) -> None:
        while True:
            connection, *frames = await self._router.recv_multipart()
            failure = self.delivery.failure
            for header in self._answerer.answers(connection, frames, now_s=self._clock()):
                await self._send(connection, header)
            self._after_change(failure)

    async def _tick_all(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            failure = self.delivery.failure
            for rank in self.delivery.tick(now_s=self._clock()):
                self._observer.rank_left(rank, is_lost=True)
            self._after_change(failure)

    def _after_change(self, failure_before: object) -> None:
        failure = self.delivery.failure
        if failure is not None and failure is not failure_before:
            self._observer.step_failed(failure.step, rank=failure.rank, reason=failure.reason)
        self._forget()
        self.wake()

    def _forget(self) -> None:
        for step in self.delivery.forget():
            del self._steps[step]
            self._observer.step_committed(step)
        if self.delivery.is_drained:
            self._drained.set()

    async def _send_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while await self._send_round():
                continue

    async def _send_round(self) -> bool:
        """One decision for each rank, so that no rank waits for another's whole credit."""
        has_sent = False
        for rank in list(self.delivery.ranks.values()):
            decision = self.delivery.next_for(rank)
            if decision is not None:
                has_sent = True
                await self._carry_out(rank, decision)
        return has_sent

    async def _carry_out(self, rank: RankState, decision: Decision) -> None:
        connection = rank.connection
        assert connection is not None, "absent ranks get no decisions"
        match decision:
            case Send():
                await self._send_micro_batch(rank, connection, decision)
            case Release(place):
                await self._send(connection, ReleaseMessage(step=place[0], index=place[1]))
            case Abort(step, reason):
                await self._send(connection, AbortMessage(step=step, reason=reason))
            case End(last_step):
                await self._send(connection, EndMessage(last_step=last_step))

    async def _send_micro_batch(self, rank: RankState, connection: bytes, send: Send) -> None:
        step = self._steps[send.step]
        body, fields = await asyncio.to_thread(
            _chunk_of, step, send.index, rank.dp_rank, rank.cp_rank
        )
        if rank.connection != connection or self.delivery.ranks.get(rank.global_rank) is not rank:
            return  # it left or said hello again meanwhile: this is no part of the new order
        header = MicroBatchMessage(
            run_id=step.run_id,
            step=send.step,
            index=send.index,
            count=send.count,
            seq=send.seq,
            fields=fields,
            model=step.model,
        )
        if await self._send(connection, header, body):
            self._observer.micro_batch_sent(rank, step=send.step, sent_bytes=len(body))

    async def _send(self, connection: bytes, header: Header, body: Frame | None = None) -> bool:
        """False when nobody is there any more: the rank will say hello."""
        frames = encode_message(header, body)
        try:
            await self._router.send_multipart([connection, *frames])
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EHOSTUNREACH:
                raise
            rank = self.delivery.leave(connection)
            if rank is not None:
                self._observer.rank_left(rank, is_lost=True)
            return False
        return True


def _digest_and_decode(body: bytes) -> tuple[str, Step]:
    return hashlib.sha256(body).hexdigest(), decode_step(body)


def _chunk_of(
    step: Step, index: int, dp_rank: int, cp_rank: int
) -> tuple[bytes, tuple[Field, ...]]:
    """One rank's chunk as bytes, and the fields that its whole row carries."""
    batch = step.grid[dp_rank][index]
    chunk = cut_chunk(batch, cp_rank=cp_rank, cp_size=step.cp_size, layout=step.layout)
    fields: tuple[Field, ...] = ("routed_experts", "sampling_mask")
    present = {segment.field for segment in batch.segments}
    return encode_chunk(chunk, step.model), tuple(field for field in fields if field in present)
