"""A scope that ends when nobody wants its result any more: the client left, the session was
discarded, or the deadline passed. What runs inside is cancelled once and may clean up.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive

from services.inference_proxy.sessions import Session


class Unwanted(Exception):
    """The scope was ended from outside."""


class ClientGone(Unwanted):
    """The client closed its connection."""


class SessionDiscarded(Unwanted):
    """The request's session was deleted while it ran."""


class DeadlinePassed(Unwanted):
    """The request's own deadline passed."""


@asynccontextmanager
async def while_wanted(
    receive: Receive, *, deadline_s: float, session: Session | None = None
) -> AsyncIterator[None]:
    """Run the body until it ends or is unwanted. Raises ClientGone, SessionDiscarded,
    DeadlinePassed.

    ``receive`` is the request's own, its body already read.
    """
    loop = asyncio.get_running_loop()
    why: list[type[Unwanted]] = []
    is_open = True

    def stop(reason: type[Unwanted]) -> Callable[[], None]:
        def act() -> None:
            if is_open and not scope.expired():
                why.append(reason)
                scope.reschedule(loop.time())

        return act

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        stop(ClientGone)()

    try:
        async with asyncio.timeout(deadline_s) as scope:
            discard = stop(SessionDiscarded)
            watcher = asyncio.create_task(watch())
            if session is not None:
                session.on_discard.add(discard)
            try:
                yield
            finally:
                # What the body has made is the caller's now: nothing may cancel us below.
                is_open = False
                if not scope.expired():
                    scope.reschedule(None)
                if session is not None:
                    session.on_discard.discard(discard)
                watcher.cancel()  # it ends at its only wait; nobody has to see it
    except TimeoutError as exc:
        if not scope.expired():
            raise
        raise (why[0] if why else DeadlinePassed) from exc
