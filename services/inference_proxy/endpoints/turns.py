"""Kept train turns: given to whoever hands a rollout in by request ids or by its session."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter, Request, Response

from services.inference_proxy.endpoints.parts import Parts, PartsDep
from services.inference_proxy.endpoints.whole import PartsResponse
from services.inference_proxy.errors import (
    TURN_PROBLEMS,
    as_problems,
)
from services.inference_proxy.kept_turn import TurnRef
from services.inference_proxy.long_json import size_of
from services.inference_proxy.offload import offload
from services.inference_proxy.turn_schemas import (
    TurnList,
    TurnsAsked,
    TurnsReleased,
    turns_json,
    turns_packed,
)
from services.inference_proxy.turn_source import TurnsWanted
from services.inference_proxy.workers.errors import WorkerSilent
from services.kit.problems import Problem, responses
from services.kit.turns import TURNS_CONTENT_TYPE
from sideband.ids import RequestId, RunId, SessionId

router = APIRouter(tags=["turns"])


@router.post(
    "/v1/turns/fetch",
    summary="Give kept train turns",
    response_class=Response,
    responses={
        **responses(*TURN_PROBLEMS, WorkerSilent),
        200: {
            "model": TurnList,
            "description": "The turns in the order asked for, or of the session.",
            "content": {TURNS_CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        },
    },
)
async def fetch_turns(asked: TurnsAsked, request: Request, parts: PartsDep) -> Response:
    """All of them or a problem that names the first one that cannot be given. Nothing changes:
    ask as often as you like, until the turns are released.

    The binary form is sent when `Accept` names it: a msgpack array of turns as the orchestrator
    takes them.
    """
    with _refused(parts), as_problems():
        encoded = await parts.kept.fetch(_wanted(asked))
    parts.metrics.kept.fetched_total.inc(len(encoded))
    size_bytes = sum(map(size_of, encoded))
    if TURNS_CONTENT_TYPE in request.headers.get("accept", ""):
        return PartsResponse(turns_packed(encoded), media_type=TURNS_CONTENT_TYPE)
    # Lists of numbers take longer to write than bytes: a tenth of the size is already much.
    content = await offload(lambda: turns_json(encoded), size_bytes=10 * size_bytes)
    return PartsResponse(content, media_type="application/json")


@router.post(
    "/v1/turns/release",
    summary="Let go of turns that were handed in durably",
    responses=responses(WorkerSilent),
)
async def release_turns(asked: TurnsAsked, parts: PartsDep) -> TurnsReleased:
    """Their memory is freed; their files are untouched. Idempotent."""
    count = await parts.kept.release(_wanted(asked))
    parts.metrics.kept.released_total.inc(count)
    return TurnsReleased(released=count)


def _wanted(asked: TurnsAsked) -> TurnsWanted:
    return TurnsWanted(
        session_id=None if asked.session_id is None else SessionId(asked.session_id),
        choice=asked.choice,
        refs=[
            TurnRef(request_id=RequestId(each.request_id), choice=each.choice)
            for each in asked.turns or ()
        ],
        run_id=None if asked.run_id is None else RunId(asked.run_id),
    )


@contextmanager
def _refused(parts: Parts) -> Iterator[None]:
    try:
        yield
    except Problem as problem:
        parts.metrics.kept.refused_total.labels(problem.code).inc()
        raise
