"""What a worker does for another one that asks."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from services.inference_proxy.endpoints.parts import Parts
from services.inference_proxy.engine import Engine
from services.inference_proxy.turn_source import OwnTurns
from services.inference_proxy.views import engine_views, sessions_view
from services.inference_proxy.workers.asks import (
    Adopt,
    AnyAsk,
    AnyReply,
    Done,
    Drain,
    Drained,
    Fetch,
    Known,
    Look,
    Release,
    Released,
    Scrape,
    Seen,
    Text,
    Words,
)
from services.inference_proxy.workers.state import FollowingBook, SharedState, adopt
from services.inference_proxy.workers.turns import given, words_of

PROBE_WAIT_S: Final = 2.0  # well below what the leader waits


class Answering:
    """Answers from ``parts``. ``not_ready`` and ``scrape`` say what the common routes say."""

    def __init__(
        self,
        parts: Parts,
        *,
        not_ready: Callable[[], list[str]],
        scrape: Callable[[], bytes],
        adopted: SharedState | None,
    ) -> None:
        self._parts, self._not_ready, self._scrape = parts, not_ready, scrape
        self._number = 0 if adopted is None else adopted.number
        self._own = OwnTurns(parts.keeper.turns)

    async def __call__(self, ask: AnyAsk) -> AnyReply:
        """The reply to one ask."""
        parts = self._parts
        match ask:
            case Adopt():
                return await self._adopted(ask.state)
            case Drain():
                return Drained(await parts.gate.drain(timeout_s=ask.timeout_s))
            case Look():
                return self._seen(ask.sessions)
            case Scrape():
                return Text(self._scrape())
            case Words():
                return Known(words_of(self._own, ask.request_ids))
            case Fetch():
                return await given(self._own, ask.wanted)
            case Release():
                return Released(await self._own.release(ask.wanted))
            case _:
                raise AssertionError(f"a worker is not asked to {type(ask).__name__}")

    async def _adopted(self, state: SharedState) -> Done:
        book = self._parts.book
        assert isinstance(book, FollowingBook), "nobody tells the leader"
        if state.number > self._number:
            self._number = state.number
            if state.is_settled:
                self._parts.pusher.settled.set()
            await self._probe(adopt(state, book, self._parts.gate))
            self._parts.metrics.policy_version_applied.set(book.applied)
        return Done()

    async def _probe(self, returned: Sequence[Engine]) -> None:
        """See whether they serve, all at once. One that hangs is left to its own next probe: who
        waits for this would take the worker for hanging.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROBE_WAIT_S):
                await asyncio.gather(*(self._parts.probes.probe(engine) for engine in returned))

    def _seen(self, sessions: int) -> Seen:
        parts = self._parts
        shown = sessions_view(parts.sessions, limit=sessions)
        return Seen(
            in_flight=parts.gate.in_flight,
            not_ready=self._not_ready(),
            engines=[view.model_dump(mode="json") for view in engine_views(parts.book)],
            sessions=[view.model_dump(mode="json") for view in shown.sessions],
            session_count=shown.count,
            older=[engine.name for engine in parts.book if engine.is_older_than_told],
            naming=[engine.name for engine in parts.book if engine.names_weights],
        )
