"""Rollouts: delivered in JSON or in the binary form, looked at, dropped."""

import asyncio
from itertools import islice
from typing import Final

import msgspec
import orjson
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from services.kit.problems import InvalidRequest, responses
from services.orchestrator.endpoints.parts import EVERYWHERE, RolloutPath, Service, shown
from services.orchestrator.errors import (
    REFUSALS,
    LeaseUnknown,
    RolloutConflict,
    RolloutInStep,
    RolloutUnknown,
    StorageFull,
    TooManyRollouts,
    UnsupportedForm,
)
from services.orchestrator.limits import (
    DECODE_INLINE_BYTES_MAX,
    DETAIL_CHARACTERS_MAX,
    LIST_ITEMS_MAX,
)
from services.orchestrator.reference_errors import (
    NoProxy,
    ProxyUnavailable,
    TurnGone,
    TurnsMissing,
)
from services.orchestrator.references import deliver_by_reference
from services.orchestrator.rollout_schemas import RolloutBody, inlined_schema
from services.orchestrator.schemas import Receipt, Rollouts, RolloutView
from services.orchestrator.wire import ROLLOUT_CONTENT_TYPE, DeliveredWire, decode_rollout
from sideband.ids import RolloutId

router = APIRouter(tags=["rollouts"])
admin_router = APIRouter(tags=["rollouts"])  # of what environments must not do
JSON: Final = "application/json"

_REQUEST_BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {"schema": inlined_schema()},
            ROLLOUT_CONTENT_TYPE: {
                "schema": {
                    "type": "string",
                    "format": "binary",
                    "description": "MessagePack of the same fields. prompt_token_ids, "
                    "completion_token_ids and weight_versions are int32, logprobs and advantages "
                    "float32, little-endian bytes; sampled is one byte per completion token.",
                }
            },
        },
    }
}


@router.post(
    "/v1/rollouts",
    status_code=202,
    summary="Deliver a finished rollout",
    responses=responses(
        *EVERYWHERE,
        UnsupportedForm,
        LeaseUnknown,
        RolloutConflict,
        TooManyRollouts,
        StorageFull,
        TurnsMissing,
        TurnGone,
        NoProxy,
        ProxyUnavailable,
        *REFUSALS.values(),
    ),
    openapi_extra=_REQUEST_BODY,
)
async def deliver_rollout(request: Request, service: Service) -> Receipt:
    """Idempotent by rollout id and content. A refused rollout ends its lease; its files go.

    In place of `turns` it may name the turns that the proxy has kept, by `turn_refs` or by
    `session_id`. If one of them cannot be given the lease stays open.
    """
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    decode = {JSON: _from_json, ROLLOUT_CONTENT_TYPE: decode_rollout}.get(content_type)
    if decode is None:
        raise UnsupportedForm(
            f"A rollout comes as {JSON} or {ROLLOUT_CONTENT_TYPE}, not {content_type[:100]!r}."
        )
    body = await request.body()
    try:
        if len(body) <= DECODE_INLINE_BYTES_MAX:
            wire = decode(body)
        else:
            wire = await asyncio.to_thread(decode, body)
    except ValidationError as exc:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in exc.errors()]
        raise RequestValidationError(errors) from exc
    except orjson.JSONDecodeError as exc:
        fault = {"loc": ("body",), "msg": f"must be JSON: {exc}"[:DETAIL_CHARACTERS_MAX]}
        raise RequestValidationError([fault]) from exc
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidRequest(f"body: {exc}"[:DETAIL_CHARACTERS_MAX]) from exc
    if wire.ways > 1:
        raise InvalidRequest("body: has more than one of turns, turn_refs and session_id")
    if wire.is_by_reference:
        return Receipt.of(await deliver_by_reference(service, service.proxy, wire))
    return Receipt.of(await service.deliver(wire.with_turns(wire.turns), len(body)))


def _from_json(body: bytes) -> DeliveredWire:
    return RolloutBody.model_validate(orjson.loads(body)).to_wire()


@router.get(
    "/v1/rollouts", summary="Rollouts, the latest change first", responses=responses(*EVERYWHERE)
)
async def list_rollouts(service: Service) -> Rollouts:
    """Held ones and those that ended not long ago."""
    latest = islice(reversed(service.book.rollouts.values()), LIST_ITEMS_MAX)
    views = [RolloutView.of(rollout) for rollout in latest]
    return await shown(service, Rollouts(rollouts=views, count=len(service.book.rollouts)))


@router.get(
    "/v1/rollouts/{rollout_id}",
    summary="One rollout",
    responses=responses(*EVERYWHERE, RolloutUnknown),
)
async def get_rollout(rollout_id: RolloutPath, service: Service) -> RolloutView:
    """Where it is and what it keeps."""
    return await shown(service, RolloutView.of(service.rollout(RolloutId(rollout_id))))


@admin_router.delete(
    "/v1/rollouts/{rollout_id}",
    summary="Drop a collected rollout",
    responses=responses(*EVERYWHERE, RolloutUnknown, RolloutInStep),
)
async def drop_rollout(rollout_id: RolloutPath, service: Service) -> RolloutView:
    """It will not train; its files are deleted; its reward leaves its group. Idempotent."""
    return RolloutView.of(await service.drop_rollout(RolloutId(rollout_id)))
