"""Rollouts: delivered in JSON or in the binary form, looked at, dropped."""

import asyncio
from itertools import islice
from typing import Final

from fastapi import APIRouter, Request

from services.kit.problems import InvalidRequest, responses
from services.kit.readers.held import HeldBody, held_body
from services.kit.readers.pool import ReaderLost, ReadersBusy
from services.orchestrator.decoding import CONTENT_TYPES, JSON, Undecodable, decode_delivered
from services.orchestrator.delivering import deliver, deliver_large
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
from services.orchestrator.limits import LIST_ITEMS_MAX, READ_INLINE_BYTES_MAX
from services.orchestrator.reading import LargeRollout
from services.orchestrator.records import Rollout
from services.orchestrator.reference_errors import (
    NoProxy,
    ProxyUnavailable,
    TurnGone,
    TurnsMissing,
)
from services.orchestrator.references import deliver_by_reference
from services.orchestrator.rollout_schemas import inlined_schema
from services.orchestrator.schemas import Receipt, Rollouts, RolloutView
from services.orchestrator.service import Orchestrator
from services.orchestrator.wire import ROLLOUT_CONTENT_TYPE
from sideband.ids import RolloutId

router = APIRouter(tags=["rollouts"])
admin_router = APIRouter(tags=["rollouts"])  # of what environments must not do

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
        ReadersBusy,
        ReaderLost,
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
    if content_type not in CONTENT_TYPES:
        raise UnsupportedForm(
            f"A rollout comes as {JSON} or {ROLLOUT_CONTENT_TYPE}, not {content_type[:100]!r}."
        )
    try:
        with held_body(service.readers) as body:
            await body.fill(request.stream())
            if body.is_large:
                return Receipt.of(await _take_large(service, content_type, body))
            return Receipt.of(await _take(service, content_type, body.whole()))
    except Undecodable as exc:
        raise _invalid(exc) from exc


async def _take(service: Orchestrator, content_type: str, body: bytes) -> Rollout:
    if len(body) <= READ_INLINE_BYTES_MAX:
        wire = decode_delivered(content_type, body)
    else:
        wire = await asyncio.to_thread(decode_delivered, content_type, body)
    _check_ways(wire.ways)
    if wire.is_by_reference:
        return await deliver_by_reference(service, service.proxy, wire)
    return await deliver(service, wire.with_turns(wire.turns), len(body))


async def _take_large(service: Orchestrator, content_type: str, body: HeldBody) -> Rollout:
    async with service.readers.job() as job:
        large = await LargeRollout.opened(job, content_type, body.parts)
        _check_ways(large.ways)
        if not large.wire.is_by_reference:
            return await deliver_large(service, large)
    return await deliver_by_reference(service, service.proxy, large.wire)


def _check_ways(ways: int) -> None:
    if ways > 1:
        raise InvalidRequest("body: has more than one of turns, turn_refs and session_id")


def _invalid(error: Undecodable) -> InvalidRequest:
    problem = InvalidRequest(error.detail)
    if error.faults:
        problem.facts["faults"] = [fault.model_dump() for fault in error.faults]
    return problem


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
