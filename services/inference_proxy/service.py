"""Token-in/token-out requests from plan to answer: retries, the session's memory, streams.

No HTTP here. A request is planned once (version, session, first row wanted), then attempted until
an attempt succeeds or ``attempts_max`` have failed; only what reached the client is remembered.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Protocol, TypeVar

import numpy as np
import structlog

from services.inference_proxy.admission import Gate
from services.inference_proxy.answers import MalformedAnswer
from services.inference_proxy.assembly import Outcome, Range
from services.inference_proxy.attempts import Attempts, Opened
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.events import (
    EventSplitter,
    EventTooLarge,
    joined_if_small,
    write_event,
)
from services.inference_proxy.feeding import EventFeed
from services.inference_proxy.keeping import Keeper
from services.inference_proxy.kept_turn import KeptTurn
from services.inference_proxy.limits import (
    EVENT_BYTES_MAX,
    EVENTS_PER_TURN_MAX,
    VALUE_BYTES,
)
from services.inference_proxy.metrics import Metrics
from services.inference_proxy.offload import offload
from services.inference_proxy.payloads import RootHandle, RootNotReady
from services.inference_proxy.planning import Call, Place, Plan, make_plan
from services.inference_proxy.relay import StreamRelay
from services.inference_proxy.retries import RetryLimits, retried
from services.inference_proxy.sessions import Session, SessionBook, Tokens, covered_until
from services.inference_proxy.spill import Spill, SpillFailed
from services.inference_proxy.upstream import EngineBroke, UpstreamError
from sideband.ids import RunId, SessionId

log = structlog.get_logger(__name__)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Attempt(Protocol[T_co]):
    """Makes attempt number ``attempt``, best not at the engines in ``avoid``."""

    async def __call__(self, plan: Plan, attempt: int, avoid: AbstractSet[str]) -> T_co: ...


class GenerateService:
    """What the generate endpoint calls."""

    def __init__(
        self,
        attempts: Attempts,
        book: EngineBook,
        sessions: SessionBook,
        root: RootHandle,
        gate: Gate,
        spill: Spill | None,
        keeper: Keeper,
        *,
        retries: RetryLimits,
        metrics: Metrics,
    ) -> None:
        self._attempts, self._book, self._sessions = attempts, book, sessions
        self._root, self._gate, self._retries, self._metrics = root, gate, retries, metrics
        self._spill, self._keeper = spill, keeper
        self._has_warned = False

    def plan(self, call: Call) -> Plan:
        """Decide what to ask. Raises VersionChanged and RootNotReady."""
        is_train = call.kind == "train"
        place = self.place(call.session_id, call.policy_version, is_train=is_train)
        return self.plan_at(place, call)

    def place(
        self, session_id: SessionId | None, policy_version: int | None, *, is_train: bool
    ) -> Place:
        """The run, the session and its policy version. Raises VersionChanged and RootNotReady."""
        run_id = self._run_id() if is_train else None
        session: Session | None = None
        version = self._book.applied if policy_version is None else policy_version
        if is_train and session_id is not None:
            session = self._sessions.enter(
                session_id, asked=policy_version, applied=self._book.applied
            )
            version = session.policy_version
        return Place(session=session, policy_version=version, run_id=run_id)

    def plan_at(self, place: Place, call: Call) -> Plan:
        """Decide what to ask of a request whose prompt is known by now."""
        session = place.session
        if session is not None:
            self._sessions.retract(session, call.request_id, call.prompt)
        plan = make_plan(
            call, session=session, policy_version=place.policy_version, run_id=place.run_id
        )
        if session is not None:
            self._metrics.rows_not_asked_total.inc(plan.prompt_start)
        return plan

    async def whole(self, plan: Plan) -> Outcome:
        """The whole answer. Raises what the last attempt raised."""
        with busy(plan.session):
            outcome = await self._retried(plan, self._attempts.whole)
        self.count(plan, outcome.form)
        return outcome

    def delivered(self, plan: Plan, outcome: Outcome, kept: KeptTurn | None) -> None:
        """The client has it: its rows will not be asked for again, and its turn is kept."""
        self._remember(plan, outcome.token_ids, outcome.ranges, outcome.files)
        if kept is not None:
            self._keeper.turns.put(kept)

    def lost(self, plan: Plan, outcome: Outcome) -> None:
        """The client left before it could get it: nobody knows of its files."""
        self._attempts.drop(plan, outcome.files, "client_gone")

    async def open(self, plan: Plan) -> Opened:
        """A stream that has begun upstream; hand it to ``events`` at once."""
        with busy(plan.session):
            return await self._retried(plan, self._attempts.open)

    async def events(self, plan: Plan, opened: Opened) -> AsyncGenerator[bytes, None]:
        """The events for the client, after one empty part that says: begun, so closing cleans up.

        Closing the iterator cancels the engine; a stream that does not come to its end leaves no
        file.
        """
        record = self._keeper.record(plan)
        relay = StreamRelay(plan, opened.request_id, opened.prefill, record)
        is_delivered = False
        try:
            with self._gate.counted(), busy(plan.session), self.answering(plan):
                yield b""
                async with aclosing(self._relayed(plan, relay, opened)) as parts:
                    async for part in parts:
                        yield part
            is_discarded = plan.session is not None and plan.session.is_discarded
            is_delivered = relay.is_complete and not is_discarded
            if is_delivered and record is not None:
                kept = await offload(
                    lambda: self._keeper.encoded(plan, record),
                    size_bytes=record.values * VALUE_BYTES,
                )
                self._keeper.turns.put(kept)
        finally:
            if is_delivered:
                self.count(plan, relay.form)
                self._attempts.drop(plan, relay.files_dropped, "unused_leg")
                self._remember(plan, relay.token_ids, relay.ranges, relay.files)
            else:
                self._metrics.generate_total.add(plan.call.kind, "stream_broken")
                self._attempts.drop_ids(plan, opened.request_ids, "broken_stream")
            await opened.stack.aclose()

    async def _relayed(
        self, plan: Plan, relay: StreamRelay, opened: Opened
    ) -> AsyncGenerator[bytes, None]:
        splitter = EventSplitter(bytes_max=EVENT_BYTES_MAX)
        engine = opened.reply.engine
        at_least = self._book.least(plan.policy_version) if plan.is_train else 0
        feed = EventFeed(
            relay,
            opened,
            plan,
            self._spill,
            at_least=at_least,
            confirm=lambda: self._attempts.confirm(plan, opened),
        )
        try:
            async with opened.stack:  # an error inside counts against the engine
                async for chunk in opened.reply.chunks():
                    for number, event in enumerate(splitter.feed(chunk), 1):
                        if number % EVENTS_PER_TURN_MAX == 0:
                            await asyncio.sleep(0)  # a part may hold very many events
                        for part in joined_if_small(await feed.parts(event)):
                            yield part
                rest = splitter.rest()
                parts = [*(await feed.parts(rest) if rest else []), *relay.end()]
                for part in joined_if_small(parts):
                    yield part
                if not relay.is_complete and not relay.has_failed:
                    raise EngineBroke(engine, "the stream ended before its last event")
        except (UpstreamError, MalformedAnswer, EventTooLarge, SpillFailed, RootNotReady) as exc:
            # The status line is long gone: the client learns it as an event, and no [DONE] comes.
            relay.has_failed = True
            log.warning("stream_broken", engine=engine, error=str(exc))
            error = {"message": str(exc), "type": "upstream_failed", "code": 502}
            yield b"".join(write_event({"error": error}))

    async def _retried(self, plan: Plan, attempt: Attempt[T]) -> T:
        avoid: set[str] = set()

        async def one(number: int) -> T:
            if number > 1:
                self._metrics.retries_total.inc()
            try:
                return await attempt(plan, number, frozenset(avoid))
            except UpstreamError as exc:
                avoid.add(exc.engine)
                raise

        return await retried(one, self._retries)

    def answering(self, plan: Plan) -> AbstractContextManager[None]:
        """While it runs, nobody is told that its turn is unknown."""
        if not plan.is_train:
            return nullcontext()
        return self._keeper.turns.running(plan.call.request_id, plan.call.session_id)

    def _run_id(self) -> RunId | None:
        if not self._root.is_set:
            return None
        if self._root.current is None:
            raise RootNotReady(self._root.problem or "the payload root is not ready")
        return self._root.current.run_id

    def _remember(
        self,
        plan: Plan,
        token_ids: dict[int, list[int]],
        ranges: dict[int, list[Range]],
        files: Iterable[str],
    ) -> None:
        session = plan.session
        if session is None or session.is_discarded:
            return
        turns: list[tuple[Tokens, int]] = []
        for index, completion in token_ids.items():
            tokens = np.concatenate([plan.prompt, np.asarray(completion, np.int32)])
            covered = covered_until(plan.prompt_start, ranges.get(index, []))
            turns.append((tokens, covered))
        self._sessions.deliver(session, plan.call.request_id, plan.prompt, turns, files)

    def count(self, plan: Plan, form: str) -> None:
        """An answer went out, its rows in this form."""
        self._metrics.generate_total.add(plan.call.kind, "ok")
        self._metrics.answers_total.add(plan.call.kind, form)
        if plan.run_id is not None and form == "inline":
            if not self._has_warned:  # a server without the plugin: every answer will be so
                log.warning("inline_instead_of_handle", request_id=plan.call.request_id)
            self._has_warned = True
            self._metrics.inline_instead_of_handle_total.inc()


class busy:  # a function to whoever uses it
    """Keeps a session from being forgotten while a request of it runs."""

    __slots__ = ("_session",)

    def __init__(self, session: Session | None) -> None:
        self._session = session

    def __enter__(self) -> None:
        if self._session is not None:
            self._session.in_flight += 1

    def __exit__(self, *_: object) -> None:
        if self._session is not None:
            self._session.in_flight -= 1
