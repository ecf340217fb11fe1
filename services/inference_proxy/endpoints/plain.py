"""A short way for what is plainly right: the generate route without the framework's own work.

``PlainRequests`` is asked before FastAPI. It takes a request only when its headers and its body are
surely what the documented route would accept, and then does what that does. Everything else, above
all whatever will be refused, goes the documented way, which alone knows how to say what is wrong.
So both ways give the same answers; which one was taken shows only in the time.
"""

from collections.abc import Mapping
from typing import Any, Final, get_args

import orjson
from fastapi import FastAPI
from msgspec import Struct
from pydantic import ValidationError
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from services.inference_proxy.endpoints.generate import PATH, Asked, answer
from services.inference_proxy.headers import TO_ENGINE
from services.inference_proxy.nesting import is_surely_flat
from services.inference_proxy.offload import offload
from services.inference_proxy.prompts import Prompt
from services.inference_proxy.raw import RAW_BYTES_MIN, split_prompt
from services.inference_proxy.refusals import Kind
from services.inference_proxy.schemas import GenerateRequest
from services.kit.auth import TokenCheck
from services.kit.reading import read_body, replayed
from services.kit.server import caller_of
from sideband.errors import InvalidId
from sideband.ids import check_id

KINDS: Final[Mapping[bytes, Kind]] = {kind.encode(): kind for kind in get_args(Kind)}
VERSION_DIGITS_MAX: Final = 9
LENGTH_DIGITS_MAX: Final = 12
CROSSING: Final = {name.encode() for name in TO_ENGINE} | {b"connection"}


class PlainHeaders(Struct, frozen=True, kw_only=True):
    """What the documented route reads from the headers."""

    kind: Kind
    session: str | None
    policy_version: int | None
    authorization: str
    declared_bytes: int
    to_engine: list[tuple[str, str]]  # those that may cross the proxy, and ``connection``


def plain_headers(headers: list[tuple[bytes, bytes]]) -> PlainHeaders | None:
    """The headers when they are plainly right; names are lower case, as in every scope."""
    named = dict(headers)
    if len(named) != len(headers) or named.get(b"content-type") != b"application/json":
        return None  # repeated, or not JSON by its plain name
    if b"x-sideband-logprobs" in named:
        return None
    kind = KINDS.get(named.get(b"x-sideband-kind", b"eval"))
    version = named.get(b"x-sideband-policy-version")
    declared = named.get(b"content-length", b"0")
    if kind is None or not (declared.isdigit() and len(declared) <= LENGTH_DIGITS_MAX):
        return None
    if version is not None and not (version.isdigit() and len(version) <= VERSION_DIGITS_MAX):
        return None
    session = named.get(b"x-sideband-session")
    session_id = None if session is None else session.decode("latin-1")
    if not is_plain_session(session_id):
        return None
    return PlainHeaders(
        kind=kind,
        session=session_id,
        policy_version=None if version is None else int(version),
        authorization=named.get(b"authorization", b"").decode("latin-1"),
        declared_bytes=int(declared),
        to_engine=[
            (name.decode(), named[name].decode("latin-1")) for name in CROSSING & named.keys()
        ],
    )


def is_plain_session(session: str | None) -> bool:
    """Whether a session's name is one, or there is none."""
    try:
        return session is None or bool(check_id("session", session))
    except InvalidId:
        return False


def plain_body(content: bytes) -> tuple[dict[str, Any], Prompt] | None:
    """The parsed body and its prompt when it is plainly right."""
    if len(content) < RAW_BYTES_MIN:
        return _small_body(content)
    found = split_prompt(content)
    if found is None:
        return None
    body, prompt = found
    prompt.read_if_long()
    try:
        GenerateRequest.model_validate({**body, "token_ids": [0]})  # the tokens were checked
    except ValidationError:
        return None
    return found


def _small_body(content: bytes) -> tuple[dict[str, Any], Prompt] | None:
    if not is_surely_flat(content):
        return None
    try:
        body: dict[str, Any] = orjson.loads(content)
        GenerateRequest.model_validate(body)
    except (orjson.JSONDecodeError, ValidationError):
        return None
    return body, Prompt(content, len(body["token_ids"]))


class PlainRequests:
    """The shortcut of the generate route; ``route`` is the documented one, for the metrics."""

    path = PATH

    def __init__(
        self, app: FastAPI, route: BaseRoute, token_check: TokenCheck, *, body_bytes_max: int
    ) -> None:
        self._app, self._route, self._token_check = app, route, token_check
        self._body_bytes_max = body_bytes_max

    async def read(self, scope: Scope, receive: Receive) -> tuple[ASGIApp | None, Receive]:
        """What answers the request when it is plainly right, and ``receive`` for who does not."""
        headers = plain_headers(scope["headers"])
        if (
            headers is None
            or scope["method"] != "POST"
            or not self._token_check.allows(headers.authorization)
            or headers.declared_bytes > self._body_bytes_max
        ):
            return None, receive
        messages, content = await read_body(receive, bytes_max=self._body_bytes_max)
        found = None
        if content is not None:
            body_bytes = content
            found = await offload(lambda: plain_body(body_bytes), size_bytes=len(body_bytes))
        if found is None:
            return None, replayed(messages, receive)
        body, prompt = found

        async def answering(scope: Scope, receive: Receive, send: Send) -> None:
            scope["route"] = self._route
            response = await answer(
                Asked(headers.to_engine, receive, caller_of(scope, receive)),
                self._app.state.parts,
                body=body,
                prompt=prompt,
                kind=headers.kind,
                session=headers.session,
                policy_version=headers.policy_version,
            )
            await response(scope, receive, send)

        return answering, receive
