"""One attempt at a request: one leg, or a prefill leg and a decode leg.

An attempt that does not succeed leaves nothing behind: whatever its engines wrote, or may still be
writing, is handed to the janitor, also when it is cancelled. Each attempt has its own upstream ids,
so that only its own files are found.
"""

from collections.abc import AsyncIterator, Callable
from collections.abc import Set as AbstractSet
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
)
from dataclasses import dataclass

from services.inference_proxy.answers import Answer, Expected, MalformedAnswer
from services.inference_proxy.assembly import Outcome, from_one, from_pair
from services.inference_proxy.calls import EngineCalls
from services.inference_proxy.dialects.base import Body
from services.inference_proxy.engine import Engine, Role
from services.inference_proxy.events import EVENT_STREAM
from services.inference_proxy.identity import Weights
from services.inference_proxy.janitor import Janitor
from services.inference_proxy.long_json import Parts, size_of, write_long
from services.inference_proxy.offload import offload
from services.inference_proxy.planning import Plan
from services.inference_proxy.reading import read_whole
from services.inference_proxy.request_ids import AttemptIds, Leg
from services.inference_proxy.spill import Spill
from services.inference_proxy.upstream import EngineBroke, Reply, UpstreamError
from sideband.ids import RequestId


class MaskRefusal(Exception):
    """The engine returns sampling masks and cannot for this request's sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A stream that has begun. ``stack`` holds the connection; the owner closes it."""

    reply: Reply
    stack: AsyncExitStack
    engine: Engine
    known: Weights  # what was known of it when it was asked
    leg: Leg
    request_id: RequestId  # of the request whose answer this is
    request_ids: tuple[RequestId, ...]  # all that may have written a file
    prefill: Answer | None  # the prefill leg of a pair


class Attempts:
    """Makes attempts; deciding whether to make another is the caller's."""

    def __init__(
        self, calls: EngineCalls, janitor: Janitor, spill: Spill | None, *, is_pair: bool
    ) -> None:
        self._calls, self._janitor, self._spill = calls, janitor, spill
        self._is_pair = is_pair

    async def whole(self, plan: Plan, attempt: int, avoid: AbstractSet[str]) -> Outcome:
        """A whole answer, its rows merged. Raises UpstreamError, NoEngine, MalformedAnswer and
        MaskRefusal.
        """
        ids = plan.ids(attempt)
        with self._files_of(plan, ids):
            if not self._is_pair or plan.wants_one_token:
                answer = await self._one(plan, ids, self._alone, avoid)
                outcome = await offload(
                    lambda: from_one(
                        answer,
                        request_id=plan.call.request_id,
                        prompt_tokens=plan.prompt_tokens,
                        prompt_start=plan.prompt_start,
                        reads_rows=plan.is_train,
                    ),
                    size_bytes=answer.inline_bytes if plan.is_train else 0,
                )
            else:
                outcome = await self._pair(plan, ids, avoid)
            self.drop(plan, outcome.files_dropped, "unused_leg")
            return outcome

    async def open(self, plan: Plan, attempt: int, avoid: AbstractSet[str]) -> Opened:
        """A stream whose engine has begun to answer; nothing was sent to the client yet."""
        ids = plan.ids(attempt)
        with self._files_of(plan, ids):
            prefill: Answer | None = None
            role: Role = self._alone
            leg: Leg = "whole"
            if self._is_pair and not plan.wants_one_token:
                prefill = await self._one(plan, ids, "prefill", avoid, leg="prefill")
                role, leg = "decode", "decode"
            engine = self._choose(plan, role, avoid)
            body, known = self._body(plan, engine, ids, leg, prefill), engine.weights
            stack = AsyncExitStack()
            reply = await stack.enter_async_context(self._events(plan, engine, leg, body))
            return Opened(
                reply=reply,
                stack=stack,
                engine=engine,
                known=known,
                leg=leg,
                request_id=ids.of(leg),
                request_ids=_every_id(ids),
                prefill=prefill,
            )

    def drop(self, plan: Plan, files: AbstractSet[str], reason: str) -> None:
        """Delete files of an attempt that nothing refers to."""
        if not files:
            return
        self._janitor.discard(policy_version=plan.policy_version, files=files, reason=reason)

    def drop_ids(self, plan: Plan, ids: tuple[RequestId, ...], reason: str) -> None:
        """Delete whatever was written under these ids."""
        if plan.run_id is not None:
            self._janitor.discard(
                policy_version=plan.policy_version, request_ids=ids, reason=reason
            )

    async def _pair(self, plan: Plan, ids: AttemptIds, avoid: AbstractSet[str]) -> Outcome:
        prefill = await self._one(plan, ids, "prefill", avoid, leg="prefill")
        decode = await self._one(plan, ids, "decode", avoid, leg="decode", prefill=prefill)
        return await offload(
            lambda: from_pair(
                prefill,
                decode,
                request_id=plan.call.request_id,
                prompt_tokens=plan.prompt_tokens,
                prompt_start=plan.prompt_start,
            ),
            size_bytes=prefill.inline_bytes + decode.inline_bytes,
        )

    async def _one(
        self,
        plan: Plan,
        ids: AttemptIds,
        role: Role,
        avoid: AbstractSet[str],
        *,
        leg: Leg = "whole",
        prefill: Answer | None = None,
    ) -> Answer:
        engine = self._choose(plan, role, avoid)
        body, known = self._body(plan, engine, ids, leg, prefill), engine.weights
        if self._spill is not None and engine.spills and plan.run_id is not None:
            answer = await self._one_spilled(plan, ids.of(leg), engine, leg, body, self._spill)
        else:
            async with self._open(plan, engine, leg, body) as reply:
                content = await reply.parts()
            answer = await self._read(plan, engine, content, plan.expected(ids.of(leg)), known)
        if leg == "prefill" and [len(c.token_ids) > 1 for c in answer.choices] != [False]:
            raise MalformedAnswer("choices", "must be one, of one token, in a prefill leg")
        return answer

    async def _one_spilled(
        self,
        plan: Plan,
        request_id: RequestId,
        engine: Engine,
        leg: Leg,
        body: Body,
        spill: Spill,
    ) -> Answer:
        """The answer of an engine that writes no file, after its file was written here."""
        expected, known = plan.expected(request_id, may_name_files=False), engine.weights
        async with AsyncExitStack() as held:
            async with self._open(plan, engine, leg, body) as reply:
                await held.enter_async_context(spill.room(reply.size_bytes))
                content = await reply.parts()
            answer = await self._read(plan, engine, content, expected, known)
            return await spill.spilled(plan, leg, request_id, answer)

    async def _read(
        self, plan: Plan, engine: Engine, content: Parts, expected: Expected, known: Weights
    ) -> Answer:
        """The answer, checked. ``known`` is what was known of the weights when it was asked."""
        answer = await offload(
            lambda: read_whole(engine.dialect, content, expected), size_bytes=size_of(content)
        )
        if plan.is_train:
            await self._calls.check_weights(
                engine,
                answer.body["choices"],
                policy_version=plan.policy_version,
                known=known,
                process=answer.process,
            )
        return answer

    async def confirm(self, plan: Plan, opened: "Opened") -> None:
        """Make sure of a stream that did not show its weights. Raises UpstreamError."""
        await self._calls.confirm(
            opened.engine, policy_version=plan.policy_version, known=opened.known
        )

    @property
    def _alone(self) -> Role:
        """Who answers alone: of a pair it is prefill, for a request of one token."""
        return "prefill" if self._is_pair else "colocated"

    def _choose(self, plan: Plan, role: Role, avoid: AbstractSet[str]) -> Engine:
        return self._calls.choose(role, session=plan.call.session_id, avoid=avoid)

    def _body(
        self, plan: Plan, engine: Engine, ids: AttemptIds, leg: Leg, prefill: Answer | None
    ) -> Body:
        ask = plan.ask(engine, ids, leg)
        if leg == "prefill":
            return engine.dialect.prefill(plan.call.body, ask)
        if leg == "decode":
            assert prefill is not None, "decode follows prefill"
            return engine.dialect.decode(plan.call.body, ask, prefill.body)
        return engine.dialect.whole(plan.call.body, ask)

    def _open(
        self, plan: Plan, engine: Engine, leg: Leg, body: Body
    ) -> AbstractAsyncContextManager[Reply]:
        return self._calls.open(
            engine,
            engine.dialect.generate_path,
            leg=leg,
            content=b"".join(write_long(body)),
            headers=plan.call.headers,
            reading=mask_refusal_reader(engine, plan.call.body),
        )

    @asynccontextmanager
    async def _events(
        self, plan: Plan, engine: Engine, leg: Leg, body: Body
    ) -> AsyncIterator[Reply]:
        """A reply that is a stream of events; the client sees no other."""
        async with self._open(plan, engine, leg, body) as reply:
            kind = reply.content_type.partition(";")[0].strip().lower()
            if kind != EVENT_STREAM:
                raise EngineBroke(engine.name, f"a stream was asked for, {kind[:100]!r} came")
            yield reply

    def _files_of(self, plan: Plan, ids: AttemptIds) -> "Written":
        return Written(self, plan, ids)


class Written:
    """What an attempt writes: nothing of it stays unless the block succeeds."""

    __slots__ = ("_attempts", "_ids", "_plan")

    def __init__(self, attempts: Attempts, plan: Plan, ids: AttemptIds) -> None:
        self._attempts, self._plan, self._ids = attempts, plan, ids

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._attempts.drop_ids(self._plan, _every_id(self._ids), "losing_attempt")


def _every_id(ids: AttemptIds) -> tuple[RequestId, ...]:
    return (ids.of("whole"), ids.of("prefill"), ids.of("decode"))


def mask_refusal_reader(engine: Engine, body: Body) -> Callable[[UpstreamError], Exception]:
    """Tells the error of an engine that returns masks and cannot for this sampling: vLLM says it
    with an empty 500.
    """

    def reading(error: UpstreamError) -> Exception:
        if isinstance(error, EngineBroke) and engine.dialect.is_mask_refusal(
            body, error.status, error.error
        ):
            return MaskRefusal(error.reason)
        return error

    return reading
