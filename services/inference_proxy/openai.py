"""OpenAI requests, passed through: the engine's own answer, byte for byte, streamed or whole.

Through a prefill/decode pair the prefill leg is asked first, as for token-in/token-out requests;
the client sees decode's answer. Nothing is injected and nothing kept: train requests go another
way (``openai_turns``).
"""

from collections.abc import AsyncGenerator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import structlog

from services.inference_proxy.admission import Gate
from services.inference_proxy.attempts import mask_refusal_reader
from services.inference_proxy.calls import EngineCalls
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.long_json import Parts, dump_long, size_of
from services.inference_proxy.offload import offload
from services.inference_proxy.reading import read_parts
from services.inference_proxy.refusals import Refused, check_places
from services.inference_proxy.retries import RetryLimits, retried
from services.inference_proxy.upstream import Reply, UpstreamError, parsed
from sideband.ids import SessionId

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAICall:
    """One request. ``body`` is None for a GET; it came as ``size_bytes``."""

    path: str
    body: dict[str, Any] | None
    session_id: SessionId | None
    headers: Sequence[tuple[str, str]]
    size_bytes: int

    async def written(self, body: dict[str, Any]) -> bytes:
        """What an engine is asked, of about that size, as JSON."""
        return await offload(lambda: b"".join(dump_long(body)), size_bytes=self.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedAnswer:
    """A successful answer that has begun; ``stack`` holds its connection."""

    reply: Reply
    stack: AsyncExitStack


class OpenAIService:
    """Finds an engine, retries until one begins to answer, then only forwards."""

    def __init__(
        self,
        calls: EngineCalls,
        book: EngineBook,
        gate: Gate,
        *,
        retries: RetryLimits,
    ) -> None:
        self._calls, self._book, self._gate = calls, book, gate
        self._retries = retries

    def check(self, call: OpenAICall) -> None:
        """The rules of such a body. Raises Refused."""
        if call.body is None:
            return
        check_places(call.body)
        choices = call.body.get("n")
        if self._book.is_pair and isinstance(choices, int) and choices > 1:
            raise Refused("choices_refused", "n", "must be 1 through prefill/decode engines")

    async def open(self, call: OpenAICall) -> OpenedAnswer:
        """The beginning of an answer. Raises UpstreamError and NoEngine."""
        avoid: set[str] = set()

        async def one(_: int) -> OpenedAnswer:
            try:
                return await self._attempt(call, avoid)
            except UpstreamError as exc:
                avoid.add(exc.engine)
                raise

        return await retried(one, self._retries)

    async def chunks(self, opened: OpenedAnswer) -> AsyncGenerator[bytes, None]:
        """The answer's bytes, after one empty part that says: begun, so closing cleans up."""
        with self._gate.counted():
            async with opened.stack:
                yield b""
                async for chunk in opened.reply.chunks():
                    yield chunk

    async def _attempt(self, call: OpenAICall, avoid: AbstractSet[str]) -> OpenedAnswer:
        body, prefilled = call.body, None
        role = self._book.roles[-1]  # decode of a pair, else colocated
        if self._book.is_pair and body is not None:
            content = await self._prefill(call, body, avoid)
            prefilled = await offload(
                lambda: read_parts(content, parsed), size_bytes=size_of(content)
            )
        engine = self._calls.choose(role, session=call.session_id, avoid=avoid)
        if prefilled is not None and body is not None:
            answer = prefilled if isinstance(prefilled, dict) else {}
            body = engine.dialect.openai_decode(body, answer)
        stack = AsyncExitStack()
        reply = await stack.enter_async_context(
            self._calls.open(
                engine,
                call.path,
                leg="openai",
                content=None if body is None else await call.written(body),
                headers=call.headers,
                method="GET" if body is None else "POST",
                reading=None if body is None else mask_refusal_reader(engine, body),
            )
        )
        return OpenedAnswer(reply=reply, stack=stack)

    async def _prefill(
        self, call: OpenAICall, body: dict[str, Any], avoid: AbstractSet[str]
    ) -> Parts:
        engine = self._calls.choose("prefill", session=call.session_id, avoid=avoid)
        content = await call.written(engine.dialect.openai_prefill(body))
        async with self._calls.open(
            engine,
            call.path,
            leg="openai_prefill",
            content=content,
            headers=call.headers,
            reading=mask_refusal_reader(engine, body),
        ) as reply:
            return await reply.parts()
