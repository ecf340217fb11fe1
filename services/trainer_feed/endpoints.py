"""Routes of the feed: steps in, acknowledgements out, ranks and admin."""

import asyncio
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response

from services.kit.problems import responses
from services.trainer_feed.errors import (
    FeedBusy,
    FeedRestarted,
    LineageRefused,
    StepConflicts,
    StepMalformed,
    UnknownStep,
    WrongContentType,
    as_problems,
)
from services.trainer_feed.schemas import (
    Acknowledgements,
    FeedView,
    GoBackBody,
    RanksView,
    StepReceipt,
    StepsView,
    StepView,
    WentBack,
)
from services.trainer_feed.service import FeedService
from sideband.feed.codec import STEP_CONTENT_TYPE
from sideband.feed.limits import STEP_MAX

router = APIRouter()

STEP_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "description": "The step as docs/feed-protocol.md section 2 lays it out.",
        "content": {STEP_CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


async def _service(request: Request) -> FeedService:
    service = request.app.state.service
    assert isinstance(service, FeedService), "the lifespan builds the service"
    return service


ServiceDep = Annotated[FeedService, Depends(_service)]
ExpectedInstance = Annotated[
    str | None,
    Header(
        alias="Sideband-Feed-Instance",
        max_length=64,
        description="Do it only if the feed is still this process, as an answer named it.",
        examples=["5f2b1c"],
    ),
]
StepPath = Annotated[int, Path(ge=1, le=STEP_MAX, description="The step.", examples=[12])]


@router.put(
    "/v1/steps/{step}",
    tags=["steps"],
    summary="Hand a step over",
    status_code=201,
    openapi_extra=STEP_BODY,
    responses={
        200: {"model": StepReceipt, "description": "It was taken before, with the same content."},
        **responses(WrongContentType, FeedRestarted, StepMalformed, StepConflicts, FeedBusy),
    },
)
async def put_step(
    step: StepPath,
    request: Request,
    response: Response,
    service: ServiceDep,
    expected: ExpectedInstance = None,
) -> StepReceipt:
    """Steps come one by one. Idempotent: repeat it until it succeeds. The feed holds a step in
    memory until every rank has committed it. A feed that was started anew takes any step as its
    first: the header keeps it from taking one that must follow what it has lost.
    """
    service.check_instance(expected)
    lineage = service.lineage  # the trainer may go back while the body comes
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != STEP_CONTENT_TYPE:
        raise WrongContentType(f"The body is {kind or 'nothing'}, must be {STEP_CONTENT_TYPE}.")
    parts = [part async for part in request.stream()]
    body = await asyncio.to_thread(b"".join, parts)  # up to a gigabyte: not on the loop
    parts.clear()  # the step is held once while it is read
    with as_problems():
        receipt = await service.put(body, step=step, lineage=lineage)
    response.status_code = 201 if receipt.is_new else 200
    return StepReceipt(
        step=receipt.step,
        digest=receipt.digest,
        micro_batch_count=receipt.micro_batch_count,
        is_new=receipt.is_new,
        feed_instance=service.instance,
    )


@router.get("/v1/steps", tags=["steps"], summary="Held steps", responses=responses())
async def list_steps(service: ServiceDep) -> StepsView:
    """Steps that some rank has not committed, ascending."""
    return service.steps()


@router.get(
    "/v1/steps/{step}", tags=["steps"], summary="One held step", responses=responses(UnknownStep)
)
async def show_step(step: StepPath, service: ServiceDep) -> StepView:
    """Who has not committed it."""
    return service.step(step)


@router.get(
    "/v1/acknowledgements",
    tags=["steps"],
    summary="What the ranks have committed",
    responses=responses(),
)
async def acknowledgements(service: ServiceDep) -> Acknowledgements:
    """Files of committed steps are no longer read by any rank."""
    return service.acknowledgements()


@router.put(
    "/v1/lineage",
    tags=["steps"],
    summary="The trainer went back",
    responses=responses(LineageRefused),
)
async def go_back(body: GoBackBody, service: ServiceDep) -> WentBack:
    """Later steps and commits are void; every process that got a part of any step gets ABORT, new
    ones go on after the step. Idempotent by lineage. Called by the orchestrator.
    """
    with as_problems():
        return service.go_back(body.to_domain())


@router.post(
    "/v1/end",
    tags=["steps"],
    summary="No more steps will come",
    responses=responses(FeedRestarted),
)
async def end(service: ServiceDep, expected: ExpectedInstance = None) -> FeedView:
    """Ranks stop iterating after the last step. Idempotent. The header keeps a feed that was
    started anew from ending before it has what it lost.
    """
    service.check_instance(expected)
    return service.end()


@router.delete(
    "/v1/end", tags=["steps"], summary="More steps will come after all", responses=responses()
)
async def reopen(service: ServiceDep) -> FeedView:
    """After a run that was stopped goes on. Ranks that were told the end must be started again.
    Idempotent.
    """
    return service.reopen()


@router.get("/v1/ranks", tags=["admin"], summary="Ranks and what each has", responses=responses())
async def list_ranks(service: ServiceDep) -> RanksView:
    """Absent ranks too: a dead one is named here."""
    return service.ranks()


@router.post(
    "/v1/admin/pause", tags=["admin"], summary="Take and send nothing", responses=responses()
)
async def pause(service: ServiceDep) -> FeedView:
    """What is on the way arrives; commits count."""
    return service.pause(is_paused=True)


@router.post("/v1/admin/resume", tags=["admin"], summary="Go on", responses=responses())
async def resume(service: ServiceDep) -> FeedView:
    """Ends a pause."""
    return service.pause(is_paused=False)


@router.post(
    "/v1/admin/drain",
    tags=["admin"],
    summary="End, and wait until everything is committed",
    responses=responses(),
)
async def drain(
    service: ServiceDep,
    timeout_s: Annotated[
        float, Query(ge=0, le=3600, description="Longest wait.", examples=[30.0])
    ] = 30.0,
) -> FeedView:
    """Returns at the deadline at the latest; `waiting_for` names the ranks that are missing."""
    return await service.drain(timeout_s=timeout_s)
