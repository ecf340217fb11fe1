"""A scope that ends when nobody wants its result any more: the client left, the session was
discarded, or the deadline passed. What runs inside is cancelled once and may clean up.
"""

import asyncio
from types import TracebackType

from starlette.requests import Request
from starlette.types import Receive

from services.inference_proxy.sessions import Session
from services.kit.server import Caller


class Unwanted(Exception):
    """The scope was ended from outside."""


class ClientGone(Unwanted):
    """The client closed its connection."""


class SessionDiscarded(Unwanted):
    """The request's session was deleted while it ran."""


class DeadlinePassed(Unwanted):
    """The request's own deadline passed."""


class while_wanted:  # a function to whoever uses it
    """Run the body until it ends or is unwanted. Raises ClientGone, SessionDiscarded,
    DeadlinePassed.

    ``caller`` is the request's own.
    """

    __slots__ = ("_caller", "_is_open", "_scope", "_session", "_why")

    def __init__(
        self, caller: Caller, *, deadline_s: float, session: Session | None = None
    ) -> None:
        self._caller, self._session = caller, session
        self._scope = asyncio.timeout(deadline_s)
        self._why: type[Unwanted] = DeadlinePassed
        self._is_open = True

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._caller.watch(self._leave)
        if self._session is not None:
            self._session.on_discard.add(self._discard)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What the body has made is the caller's now: nothing may cancel us below.
        self._is_open = False
        scope = self._scope
        if not scope.expired():
            scope.reschedule(None)
        if self._session is not None:
            self._session.on_discard.discard(self._discard)
        self._caller.unwatch()
        try:
            await scope.__aexit__(kind, error, trace)
        except TimeoutError as exc:
            raise self._why from exc
        if isinstance(error, TimeoutError) and scope.expired():
            raise self._why from error

    def _stop(self, why: type[Unwanted]) -> None:
        if self._is_open and not self._scope.expired():
            self._why = why
            self._scope.reschedule(asyncio.get_running_loop().time())

    def _discard(self) -> None:
        self._stop(SessionDiscarded)

    def _leave(self) -> None:
        self._stop(ClientGone)


async def has_left(receive: Receive) -> bool:
    """Whether the client has closed its connection by now."""
    return await Request({"type": "http"}, receive).is_disconnected()
