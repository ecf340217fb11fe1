"""A short way for what is plainly right: the generate route without the framework's own work.

``PlainRoute`` comes before FastAPI's routes. It takes a request only when its headers and its body
are surely what the documented route would accept, and then does what that does. Everything else,
above all whatever will be refused, goes the documented way, which alone knows how to say what is
wrong. So both ways give the same answers; which one was taken shows only in the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

import numpy as np
import orjson
from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import URLPath
from starlette.routing import BaseRoute, Match, NoMatchFound
from starlette.types import Message, Receive, Scope, Send

from services.inference_proxy.endpoints.generate import PATH, answer
from services.inference_proxy.nesting import is_surely_flat, is_too_deep
from services.inference_proxy.raw import RAW_BYTES_MIN, split_prompt
from services.inference_proxy.refusals import Kind
from services.inference_proxy.schemas import GenerateRequest
from services.inference_proxy.sessions import Tokens
from services.kit.auth import TokenCheck
from sideband.errors import InvalidId
from sideband.ids import check_id

KINDS: Final[Mapping[bytes, Kind]] = {kind.encode(): kind for kind in get_args(Kind)}
VERSION_DIGITS_MAX: Final = 9
_TRIED: Final = "sideband.plain_tried"  # in a scope: this request goes the documented way


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainHeaders:
    """What the documented route reads from the headers."""

    kind: Kind = "eval"
    session: str | None = None
    policy_version: int | None = None


def plain_headers(headers: list[tuple[bytes, bytes]]) -> PlainHeaders | None:
    """The headers when they are plainly right; names are lower case, as in every scope."""
    named = dict(headers)
    if len(named) != len(headers) or named.get(b"content-type") != b"application/json":
        return None  # repeated, or not JSON by its plain name
    kind = KINDS.get(named.get(b"x-sideband-kind", b"eval"))
    session = named.get(b"x-sideband-session")
    version = named.get(b"x-sideband-policy-version")
    if kind is None:
        return None
    if version is not None and not (version.isdigit() and len(version) <= VERSION_DIGITS_MAX):
        return None
    return PlainHeaders(
        kind=kind,
        session=None if session is None else session.decode("latin-1"),
        policy_version=None if version is None else int(version),
    )


def plain_body(content: bytes) -> tuple[dict[str, Any], Tokens] | None:
    """The parsed body and its prompt when it is plainly right."""
    if len(content) < RAW_BYTES_MIN:
        return _small_body(content)
    found = split_prompt(content)
    if found is None:
        return None
    body, tokens = found
    if is_too_deep(content, body):
        return None
    try:
        GenerateRequest.model_validate({**body, "token_ids": [0]})  # the tokens were checked
    except ValidationError:
        return None
    return body, tokens


def _small_body(content: bytes) -> tuple[dict[str, Any], Tokens] | None:
    if not is_surely_flat(content):
        return None
    try:
        body: dict[str, Any] = orjson.loads(content)
        GenerateRequest.model_validate(body)
    except (orjson.JSONDecodeError, ValidationError):
        return None
    return body, np.asarray(body["token_ids"], np.int32)


class PlainRoute(BaseRoute):
    """Stands first among the routes of the application whose ``documented`` route it shortens."""

    def __init__(self, documented: BaseRoute, token_check: TokenCheck) -> None:
        self._documented, self._token_check = documented, token_check

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether the request may be plain: its body is not known yet."""
        is_ours = (
            scope["type"] == "http"
            and scope["path"] == PATH
            and scope["method"] == "POST"
            and _TRIED not in scope
        )
        # The metrics take the route's path from the scope.
        return (Match.FULL, {"route": self._documented}) if is_ours else (Match.NONE, {})

    def url_path_for(self, name: str, /, **path_params: Any) -> URLPath:
        """The documented route has the name."""
        raise NoMatchFound(name, path_params)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer it, or send it the documented way with its body. Raises Problem."""
        request = Request(scope, receive, send)
        await self._token_check(request)
        headers = plain_headers(scope["headers"])
        if headers is not None and is_plain_session(headers.session):
            content = await request.body()
            found = plain_body(content)
            if found is not None:
                body, prompt = found
                response = await answer(
                    request,
                    request.app.state.parts,
                    body=body,
                    prompt=prompt,
                    kind=headers.kind,
                    session=headers.session,
                    policy_version=headers.policy_version,
                )
                await response(scope, receive, send)
                return
            receive = replayed(content, receive)
        scope[_TRIED] = True
        await scope["router"](scope, receive, send)


def is_plain_session(session: str | None) -> bool:
    """Whether a session's name is one, or there is none."""
    try:
        return session is None or bool(check_id("session", session))
    except InvalidId:
        return False


def replayed(content: bytes, receive: Receive) -> Receive:
    """``receive`` before the body was read."""
    is_due = True

    async def again() -> Message:
        nonlocal is_due
        if is_due:
            is_due = False
            return {"type": "http.request", "body": content, "more_body": False}
        return await receive()

    return again
