"""Request bodies read with orjson, once: the endpoint gets the same parsed object."""

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute

from services.inference_proxy.limits import VALUES_MAX
from services.inference_proxy.long_json import size_of
from services.inference_proxy.nesting import NESTING_MAX, brackets_of, is_too_deep
from services.inference_proxy.offload import offload
from services.inference_proxy.request_errors import TooManyValues


class OrjsonRequest(Request):
    """``json()`` parses once, strictly: no NaN, no broken UTF-8, nothing without a bound."""

    async def body(self) -> bytes:
        """The body, a large one joined in a thread."""
        if not hasattr(self, "_body"):
            parts = [part async for part in self.stream()]
            self._body = await offload(lambda: b"".join(parts), size_bytes=size_of(parts))
        return self._body

    async def json(self) -> Any:
        """The parsed body, the same object at each call. Raises what ``read_json`` raises."""
        if not hasattr(self, "_json"):
            content = await self.body()
            self._json = await offload(lambda: read_json(content), size_bytes=len(content))
        return self._json


def values_at_most(content: bytes) -> int:
    """How many values the text has at most: it may hold commas and brackets in strings."""
    return 1 + content.count(b",") + brackets_of(content)


def read_json(content: bytes) -> Any:
    """The parsed text. Raises TooManyValues; orjson.JSONDecodeError also for what nests too deep.

    No parser can be interrupted: what would hold the interpreter's lock for long is not begun.
    """
    if len(content) > VALUES_MAX:  # each takes a byte at least
        count = values_at_most(content)
        if count > VALUES_MAX:
            raise TooManyValues(count)
    value = orjson.loads(content)
    if is_too_deep(content, value):
        raise orjson.JSONDecodeError(f"nests more than {NESTING_MAX} levels", "", 0)
    return value


class OrjsonRoute(APIRoute):
    """Hands an OrjsonRequest to the endpoint."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind our request class."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(OrjsonRequest(request.scope, request.receive))

        return handle
