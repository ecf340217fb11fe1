"""Train requests on OpenAI routes: the client's answer, and the turn that is kept of it."""

from typing import Any

from fastapi import Request, Response

from services.inference_proxy.dialects.openai_forms import is_chat
from services.inference_proxy.endpoints.generate import session_of
from services.inference_proxy.endpoints.parts import Parts
from services.inference_proxy.endpoints.whole import PartsResponse
from services.inference_proxy.errors import as_problems
from services.inference_proxy.events import EVENT_STREAM
from services.inference_proxy.kept_turn import KeptTurn
from services.inference_proxy.limits import LOGPROB_BYTES, OFFLOAD_BYTES_MIN
from services.inference_proxy.long_json import Parts as Content
from services.inference_proxy.offload import offload
from services.inference_proxy.openai import OpenAICall
from services.inference_proxy.openai_stream import as_events, encoded, usage_wanted
from services.inference_proxy.openai_turns import TrainTurn
from services.inference_proxy.refusals import check_openai_train
from services.inference_proxy.request_ids import new_client_id
from services.inference_proxy.upstream import EngineRefused
from services.inference_proxy.wanted import ClientGone, SessionDiscarded, has_left, while_wanted
from services.kit.server import caller_of
from sideband.ids import RequestId, check_id


async def train(
    request: Request,
    parts: Parts,
    body: dict[str, Any],
    session: str | None,
    policy_version: int | None,
) -> Response:
    """Raises Problem; an engine's refusal comes in the engine's own form."""
    path = request.scope["path"]
    with as_problems():
        session_id = session_of(session)
        request_id = named(body, path)
        call = OpenAICall(
            path=path,
            body=body,
            session_id=session_id,
            headers=request.headers.items(),
            size_bytes=len(await request.body()),
        )
        keeper = parts.keeper.turns
        with parts.gate.enter(), keeper.running(request_id, session_id):
            parts.openai.check(call)
            check_openai_train(body)
            known = None if session_id is None else parts.sessions.get(session_id)
            try:
                async with while_wanted(
                    caller_of(request.scope, request.receive),
                    deadline_s=parts.settings.request_timeout_s,
                    session=known,
                ):
                    turn = await parts.turns.whole(call, request_id, policy_version)
            except EngineRefused as exc:
                # What OpenAI clients expect is the engine's own error, not ours.
                return Response(exc.content, exc.status, media_type=exc.content_type)
            return await _answered(request, parts, body, turn)


def named(body: dict[str, Any], path: str) -> RequestId:
    """The id under which the turn is kept: the answer's ``id``. Raises InvalidId."""
    given = body.get("request_id")
    if given is not None:
        return RequestId(check_id("request_id", given))
    return RequestId(f"{'chatcmpl' if is_chat(path) else 'cmpl'}-{new_client_id()}")


async def _answered(
    request: Request, parts: Parts, asked: dict[str, Any], turn: TrainTurn
) -> Response:
    """The answer; whoever left meanwhile has not got it."""
    plan, outcome, is_delivered = turn.plan, turn.outcome, False
    told = plan is not None and outcome is not None
    parts.metrics.openai_train_total.labels("kept" if told else "untold").inc()
    is_stream, path = bool(asked.get("stream")), request.scope["path"]

    def written() -> tuple[Content, KeptTurn | None]:
        if is_stream:
            content = as_events(turn.shown, path, with_usage=usage_wanted(asked))
        else:
            content = encoded(turn.shown)
        record = parts.keeper.record(plan) if plan is not None else None
        if plan is None or outcome is None or record is None:
            return content, None
        record.take(outcome.body)
        return content, parts.keeper.encoded(plan, record)

    try:
        size_bytes = 0
        if outcome is not None:
            size_bytes = LOGPROB_BYTES * sum(map(len, outcome.token_ids.values()))
        content, kept = await offload(written, size_bytes=size_bytes)
        if size_bytes >= OFFLOAD_BYTES_MIN and await has_left(request.receive):
            raise ClientGone
        if plan is not None and plan.session is not None and plan.session.is_discarded:
            raise SessionDiscarded
        if plan is not None and outcome is not None:
            parts.generate.delivered(plan, outcome, kept)
        is_delivered = True
    finally:
        if not is_delivered and plan is not None and outcome is not None:
            parts.generate.lost(plan, outcome)
    headers = {}
    if plan is not None:
        headers["X-Sideband-Policy-Version"] = str(plan.policy_version)
    media_type = EVENT_STREAM if is_stream else "application/json"
    return PartsResponse(content, media_type=media_type, headers=headers)
