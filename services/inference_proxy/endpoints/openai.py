"""OpenAI routes, passed through to an engine; train requests are kept for their hand-in."""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from services.inference_proxy.endpoints.body import OrjsonRoute
from services.inference_proxy.endpoints.generate import (
    KindHeader,
    SessionHeader,
    VersionHeader,
    session_of,
)
from services.inference_proxy.endpoints.openai_train import train
from services.inference_proxy.endpoints.parts import Parts, PartsDep
from services.inference_proxy.endpoints.relay import RelayResponse
from services.inference_proxy.errors import OPENAI_PROBLEMS, as_problems
from services.inference_proxy.headers import to_client
from services.inference_proxy.openai import OpenAICall
from services.inference_proxy.schemas import OpenAIRequest
from services.inference_proxy.upstream import EngineRefused
from services.inference_proxy.wanted import while_wanted
from services.kit.problems import responses
from services.kit.server import caller_of

router = APIRouter(tags=["openai"], route_class=OrjsonRoute)

PATHS: Final = ("/v1/chat/completions", "/v1/completions")
_OPTIONS: Mapping[str, Any] = {
    "response_class": Response,
    "responses": {
        **responses(*OPENAI_PROBLEMS),
        200: {
            "description": "The engine's answer, whole or streamed.",
            "content": {
                "application/json": {"schema": {"type": "object"}},
                "text/event-stream": {},
            },
        },
    },
}


@router.post("/v1/chat/completions", summary="Chat; train turns are kept", **_OPTIONS)
async def chat(
    request: Request,
    body: OpenAIRequest,
    parts: PartsDep,
    kind: KindHeader = "eval",
    session: SessionHeader = None,
    policy_version: VersionHeader = None,
) -> Response:
    """The engine's answer as it is. Of a train request the tokens and rows are kept under the
    answer's `id` and its session, for a rollout that is handed in by reference.
    """
    content = await request.json()
    if kind == "train":
        return await train(request, parts, content, session, policy_version)
    return await _forward(request, parts, content, session)


@router.post("/v1/completions", summary="Completion; train turns are kept", **_OPTIONS)
async def complete(
    request: Request,
    body: OpenAIRequest,
    parts: PartsDep,
    kind: KindHeader = "eval",
    session: SessionHeader = None,
    policy_version: VersionHeader = None,
) -> Response:
    """The engine's answer as it is. Of a train request the tokens and rows are kept under the
    answer's `id` and its session, for a rollout that is handed in by reference.
    """
    content = await request.json()
    if kind == "train":
        return await train(request, parts, content, session, policy_version)
    return await _forward(request, parts, content, session)


@router.get("/v1/models", summary="Models of an engine, passed through", **_OPTIONS)
async def models(request: Request, parts: PartsDep) -> Response:
    """The engine's answer as it is."""
    return await _forward(request, parts, None, None)


async def _forward(
    request: Request,
    parts: Parts,
    body: dict[str, Any] | None,
    session: str | None,
) -> Response:
    deadline_s = parts.settings.request_timeout_s
    caller = caller_of(request.scope, request.receive)
    with as_problems():
        call = OpenAICall(
            path=request.scope["path"],
            body=body,
            session_id=session_of(session),
            headers=request.headers.items(),
            size_bytes=len(await request.body()),
        )
        with parts.gate.enter():
            parts.openai.check(call)
            try:
                async with while_wanted(caller, deadline_s=deadline_s):
                    opened = await parts.openai.open(call)
            except EngineRefused as exc:
                # What OpenAI clients expect is the engine's own error, not ours.
                return Response(exc.content, exc.status, media_type=exc.content_type)
    reply = opened.reply
    return RelayResponse(
        parts.openai.chunks(opened),
        media_type=reply.content_type,
        headers=to_client(reply.headers),
        deadline_s=deadline_s,
        status_code=reply.status,
    )
