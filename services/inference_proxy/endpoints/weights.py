"""The admin route that brings new weights to every engine."""

from fastapi import APIRouter

from services.inference_proxy.dialects.base import WeightUpdate
from services.inference_proxy.endpoints.parts import PartsDep
from services.inference_proxy.errors import (
    UpstreamFailed,
    VersionConflict,
    WeightUpdateRunning,
    as_problems,
)
from services.inference_proxy.request_errors import BodyRefused
from services.inference_proxy.schemas import WeightReport, WeightRequest
from services.inference_proxy.workers.errors import WorkerSilent
from services.kit.problems import responses

router = APIRouter(tags=["admin"])


@router.post(
    "/v1/admin/weights",
    summary="Pause, update and resume all engines",
    responses=responses(
        BodyRefused, VersionConflict, WeightUpdateRunning, UpstreamFailed, WorkerSilent
    ),
)
async def update_weights(body: WeightRequest, parts: PartsDep) -> WeightReport:
    """Every serving engine gets the weights by its own routes; the version advances once all of
    those that stay have applied it. One that fails is taken out, named, and its requests are
    ended; it comes back when its version was reported and it was returned.

    Requests that run keep the version they were dispatched with. New ones wait in the engines.
    """
    update = WeightUpdate(
        policy_version=body.policy_version,
        running=body.running,
        weights_path=body.weights_path,
        update_info=body.update_info,
        force=body.force,
    )
    try:
        with as_problems():
            outcome = await parts.weights.apply(update)
    finally:
        parts.metrics.policy_version_applied.set(parts.book.applied)
        parts.pusher.wake()
    return WeightReport(
        policy_version=body.policy_version,
        applied=parts.book.applied,
        updated=list(outcome.updated),
        failed=outcome.failed,
        left_out=list(outcome.left_out),
    )
