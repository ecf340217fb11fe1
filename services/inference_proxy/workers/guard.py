"""The last look before a request is served: a worker never answers what belongs to another."""

from starlette.types import ASGIApp, Receive, Scope, Send

from services.inference_proxy.workers.errors import Misdirected
from services.inference_proxy.workers.places import place_of_scope
from services.kit.problems import contained


class Guard:
    """In front of the application of worker ``index``."""

    def __init__(self, app: ASGIApp, *, index: int, workers: int) -> None:
        self._app, self._index, self._workers = app, index, workers
        self._refusing = contained(_refuse)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it, or say that it came the wrong way."""
        app = self._app
        if scope["type"] == "http":
            worker = place_of_scope(scope, self._workers)
            if worker is not None and worker != self._index:
                app = self._refusing
        await app(scope, receive, send)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    raise Misdirected(
        "The connection was not free to move to the worker of this session: do not pipeline.",
        headers={"Connection": "close"},
    )
