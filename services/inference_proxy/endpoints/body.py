"""Request bodies read with orjson, once: the endpoint gets the same parsed object."""

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute


class OrjsonRequest(Request):
    """``json()`` parses once, strictly: no NaN, no broken UTF-8."""

    async def json(self) -> Any:
        """The parsed body, the same object at each call."""
        if not hasattr(self, "_json"):
            self._json = orjson.loads(await self.body())
        return self._json


class OrjsonRoute(APIRoute):
    """Hands an OrjsonRequest to the endpoint."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind our request class."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(OrjsonRequest(request.scope, request.receive))

        return handle
