"""``POST /inference/v1/generate``: vLLM's token-in/token-out route."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Header, Request, Response
from msgspec import Struct
from starlette.types import Receive

from services.inference_proxy.assembly import Outcome
from services.inference_proxy.endpoints.body import OrjsonRoute
from services.inference_proxy.endpoints.parts import Parts, PartsDep
from services.inference_proxy.endpoints.relay import RelayResponse
from services.inference_proxy.endpoints.whole import WholeAnswer
from services.inference_proxy.errors import GENERATE_PROBLEMS, as_problems
from services.inference_proxy.headers import to_client
from services.inference_proxy.kept_turn import KeptTurn
from services.inference_proxy.limits import (
    LOGPROB_BYTES,
    OFFLOAD_BYTES_MIN,
    POLICY_VERSION_MAX,
)
from services.inference_proxy.logprob_forms import LogprobForm, in_form
from services.inference_proxy.long_json import Parts as Content
from services.inference_proxy.long_json import size_of, write_long
from services.inference_proxy.offload import offload
from services.inference_proxy.planning import Call, Plan
from services.inference_proxy.prompts import Prompt
from services.inference_proxy.refusals import Kind, check_generate
from services.inference_proxy.request_ids import new_client_id
from services.inference_proxy.schemas import GenerateAnswer, GenerateRequest
from services.inference_proxy.wanted import ClientGone, SessionDiscarded, has_left, while_wanted
from services.kit.problems import Problem, responses
from services.kit.server import Caller, caller_of
from sideband.engines.long_text import LongText
from sideband.ids import ID_PATTERN, RequestId, SessionId, check_id

router = APIRouter(tags=["inference"], route_class=OrjsonRoute)

PATH: Final = "/inference/v1/generate"

KindHeader = Annotated[
    Kind,
    Header(
        alias="X-Sideband-Kind",
        description="Train rollouts go by handle when a payload root is set; others stay inline.",
        examples=["train"],
    ),
]
SessionHeader = Annotated[
    str | None,
    Header(
        alias="X-Sideband-Session",
        pattern=ID_PATTERN,
        description="One rollout: keeps its engine, its policy version and what it was given.",
        examples=["rollout-7"],
    ),
]
VersionHeader = Annotated[
    int | None,
    Header(
        alias="X-Sideband-Policy-Version",
        ge=0,
        le=POLICY_VERSION_MAX,
        description="k of the lease; without it the session's, or the one applied now.",
        examples=[3],
    ),
]

LogprobHeader = Annotated[
    LogprobForm | None,
    Header(
        alias="X-Sideband-Logprobs",
        description="Form of the answer's log probabilities; the setting's by default.",
        examples=["token_strings"],
    ),
]


def session_of(value: str | None) -> SessionId | None:
    """The session named by a header. Raises InvalidId."""
    return None if value is None else SessionId(check_id("X-Sideband-Session", value))


@router.post(
    PATH,
    summary="Sample tokens; rows of train requests by handle",
    response_class=Response,
    responses={
        **responses(*GENERATE_PROBLEMS),
        200: {
            "model": GenerateAnswer,
            "description": "The answer, or its events when `stream` is set.",
            "content": {"text/event-stream": {}},
        },
    },
)
async def generate(
    request: Request,
    body: GenerateRequest,
    parts: PartsDep,
    kind: KindHeader = "eval",
    session: SessionHeader = None,
    policy_version: VersionHeader = None,
    logprobs: LogprobHeader = None,
) -> Response:
    """Forward to an engine, or to a prefill and a decode engine.

    Train requests get `payload_dir` injected when a payload root is set. The answer carries the
    rows of both legs, merged. A follow-up turn of a session asks only for rows that it has not yet.
    """
    parsed = await request.json()
    return await answer(
        Asked(request.headers.items(), request.receive, caller_of(request.scope, request.receive)),
        parts,
        body=parsed,
        prompt=Prompt.of(parsed["token_ids"]),
        kind=kind,
        session=session,
        policy_version=policy_version,
        logprob_form=logprobs,
    )


class Asked(Struct, frozen=True):
    """What is left of an HTTP request once its body was read."""

    headers: Sequence[tuple[str, str]]
    receive: Receive
    caller: Caller


async def answer(
    asked: Asked,
    parts: Parts,
    *,
    body: dict[str, Any],
    prompt: Prompt,
    kind: Kind,
    session: str | None,
    policy_version: int | None,
    logprob_form: LogprobForm | None = None,
) -> Response:
    """The answer to a request of the right shape. Raises Problem."""
    try:
        with as_problems():
            request_id = body.get("request_id") or new_client_id()
            call = Call(
                body=body,
                lazy_prompt=prompt,
                kind=kind,
                request_id=RequestId(check_id("request_id", request_id)),
                session_id=session_of(session),
                policy_version=policy_version,
                headers=asked.headers,
                logprob_form=logprob_form or parts.settings.logprob_form,
            )
            with parts.gate.enter():
                check_generate(
                    body, prompt_tokens=len(prompt), kind=kind, is_pair=parts.book.is_pair
                )
                plan = parts.generate.plan(call)
                if call.is_stream:
                    return await _streamed(asked, parts, plan)
                with parts.generate.answering(plan):
                    return await _whole(asked, parts, plan)
    except Problem as problem:
        parts.metrics.generate_total.add(kind, problem.code)
        raise


async def _whole(asked: Asked, parts: Parts, plan: Plan) -> Response:
    async with while_wanted(
        asked.caller, deadline_s=parts.settings.request_timeout_s, session=plan.session
    ):
        outcome = await parts.generate.whole(plan)
    content = await _answered(asked, parts, plan, outcome)
    parts.metrics.answer_bytes_total.add(plan.call.kind, amount=size_of(content))
    return WholeAnswer(content, plan)


async def _answered(asked: Asked, parts: Parts, plan: Plan, outcome: Outcome) -> Content:
    """The answer as bytes. Whoever left meanwhile has not got it."""
    is_delivered = False
    try:
        size_bytes = heavy_bytes(outcome.body["choices"])
        form = plan.call.logprob_form
        if form != "engine":
            size_bytes += LOGPROB_BYTES * sum(map(len, outcome.token_ids.values()))
        content, kept = await offload(lambda: _written(parts, plan, outcome), size_bytes=size_bytes)
        # Small answers were written without a wait, in which nobody can have left.
        if size_bytes >= OFFLOAD_BYTES_MIN and await has_left(asked.receive):
            raise ClientGone
        if plan.session is not None and plan.session.is_discarded:
            raise SessionDiscarded
        parts.generate.delivered(plan, outcome, kept)
        is_delivered = True
    finally:
        if not is_delivered:
            parts.generate.lost(plan, outcome)
    return content


def heavy_bytes(choices: Sequence[Mapping[str, Any]]) -> int:
    """About how many bytes of the answer are rows and JSON that nobody has read."""
    values = [value for choice in choices for value in choice.values()]
    raw_bytes = sum(len(memoryview(value)) for value in values if isinstance(value, msgspec.Raw))
    return raw_bytes + sum(len(value) for value in values if isinstance(value, (str, LongText)))


def _written(parts: Parts, plan: Plan, outcome: Outcome) -> tuple[Content, KeptTurn | None]:
    """The answer in the client's form, and its turn if it is to be kept."""
    body, form = outcome.body, plan.call.logprob_form
    content = write_long(body)
    kept = None
    if parts.keeper.keeps(plan):
        kept = parts.keeper.unread(plan, content, outcome.token_ids)
    if form != "engine":
        content = write_long({**body, "choices": in_form(body["choices"], form)})
    return content, kept


async def _streamed(asked: Asked, parts: Parts, plan: Plan) -> Response:
    deadline_s = parts.settings.request_timeout_s
    async with while_wanted(asked.caller, deadline_s=deadline_s, session=plan.session):
        opened = await parts.generate.open(plan)
    headers = to_client(opened.reply.headers)
    if plan.is_train:
        headers["X-Sideband-Policy-Version"] = str(plan.policy_version)
    return RelayResponse(
        parts.generate.events(plan, opened),
        media_type=opened.reply.content_type,
        headers=headers,
        deadline_s=deadline_s,
        session=plan.session,
    )
