"""The run: its policy version, its phase, the sweep of its files."""

from typing import Annotated

from fastapi import APIRouter, Body, Query

from services.kit.problems import responses
from services.orchestrator import reopening, returning, sweeping
from services.orchestrator.admin_schemas import (
    DrainBody,
    GoBackBody,
    PastPolicy,
    Policies,
    PolicyBody,
    PolicyView,
    ResumptionView,
    Returns,
    ReturnView,
    RunView,
    Sweep,
    SweptVersion,
    WentBackView,
)
from services.orchestrator.endpoints.parts import EVERYWHERE, Service, shown
from services.orchestrator.errors import CausePersists, NoPayloadRoot, RunEnded, RunStopped
from services.orchestrator.limits import LIST_ITEMS_MAX
from services.orchestrator.return_errors import (
    LineageConflict,
    NotDurable,
    StepNotCommitted,
    StepsMoving,
)

router = APIRouter(tags=["admin"])


@router.get(
    "/v1/policy-version",
    summary="The policy version as known here",
    responses=responses(*EVERYWHERE),
)
async def get_policy_version(service: Service) -> PolicyView:
    """The proxy is the source of truth; this is what it told last."""
    book = service.book
    view = PolicyView(policy_version=book.policy_version, highest_applied=book.policy_applied)
    return await shown(service, view)


@router.put(
    "/v1/policy-version",
    summary="Tell the policy version",
    responses=responses(*EVERYWHERE, LineageConflict),
)
async def put_policy_version(body: PolicyBody, service: Service) -> PolicyView:
    """Pushed by the proxy when every serving engine has applied it. Idempotent."""
    service.pushes += 1
    await service.set_policy_version(body.policy_version, "push", lineage=body.lineage)
    return await get_policy_version(service)


@router.get(
    "/v1/policy-versions",
    summary="Policy versions that the engines have served",
    responses=responses(*EVERYWHERE),
)
async def list_policy_versions(service: Service) -> Policies:
    """The last ones, each from the time on at which all serving engines had it."""
    records = list(service.book.policies)[-LIST_ITEMS_MAX:]
    return await shown(
        service, Policies(policy_versions=[PastPolicy.of(record) for record in records])
    )


@router.get("/v1/run", summary="The run at a glance", responses=responses(*EVERYWHERE))
async def get_run(service: Service) -> RunView:
    """Phase, counts, and what an end would wait for."""
    return await shown(service, RunView.of(service.book, service.feed_failure))


@router.get(
    "/v1/run/resumption",
    summary="What the last beginning found",
    responses=responses(*EVERYWHERE),
)
async def get_resumption(service: Service) -> ResumptionView:
    """Everything that was dropped because its files are gone is listed here."""
    return ResumptionView.of(service.resumption.report)


@router.get(
    "/v1/run/returns",
    summary="Times that the trainer went back",
    responses=responses(*EVERYWHERE),
)
async def get_returns(service: Service) -> Returns:
    """The last ones, each with all that it dropped."""
    records = service.book.returns[-LIST_ITEMS_MAX:]
    return await shown(service, Returns(returns=[ReturnView.of(record) for record in records]))


@router.post(
    "/v1/admin/go-back",
    summary="The trainer restarts from an earlier checkpoint",
    responses=responses(
        *EVERYWHERE,
        LineageConflict,
        NotDurable,
        RunEnded,
        RunStopped,
        StepNotCommitted,
        StepsMoving,
    ),
)
async def go_back(body: GoBackBody, service: Service) -> WentBackView:
    """Steps after it are handed over again, in order, with the same bytes, as far as their files
    are still there (`applied_steps_kept`); what is gone is dropped and listed. Commits after it are
    void, and the feed ends the processes of before: it is told before the answer, where it can be
    reached (`is_feed_told`). Leases are given again when the engines have an
    older policy version than before: push the checkpoint's weights first.
    """
    record = await returning.go_back(service, step=body.step, lineage=body.lineage)
    is_told = await returning.tell_feed_within(service, returning.TELLING_S_MAX)
    view = ReturnView.of(record).model_dump()
    return await shown(service, WentBackView(**view, is_feed_told=is_told))


@router.post("/v1/admin/pause", summary="Give no new leases", responses=responses(*EVERYWHERE))
async def pause(service: Service) -> RunView:
    """Running rollouts are still taken, steps go on. A run that a fault has stopped is then paused
    once it is reopened. Idempotent.
    """
    await service.pause()
    return await shown(service, RunView.of(service.book, service.feed_failure))


@router.post(
    "/v1/admin/resume",
    summary="Give leases again",
    responses=responses(*EVERYWHERE, RunEnded, RunStopped),
)
async def resume(service: Service) -> RunView:
    """After a pause. Idempotent."""
    await service.resume()
    return await shown(service, RunView.of(service.book, service.feed_failure))


@router.post(
    "/v1/admin/reopen",
    summary="Go on with a run that a fault stopped",
    responses=responses(*EVERYWHERE, CausePersists, RunEnded),
)
async def reopen(service: Service) -> RunView:
    """Everything that stops a run is tried first: policies that are late, steps that cannot be
    built, a feed that refuses the next one. What is still so is a 409 that says it. Then the run
    goes on as it was (paused if it was paused, a drain as a drain) and `reason` says what had
    stopped it. Leases that were cancelled stay so; ranks, which were told the end, must be started
    again. Idempotent.
    """
    await reopening.reopen(service)
    return await shown(service, RunView.of(service.book, service.feed_failure))


@router.post("/v1/admin/drain", summary="End the run", responses=responses(*EVERYWHERE))
async def drain(
    service: Service,
    body: Annotated[
        DrainBody | None, Body(description="Deadlines; the settings' by default.")
    ] = None,
) -> RunView:
    """No new leases; what is collected is trained; ends by its deadline in any case. Idempotent."""
    asked = body or DrainBody()
    await service.drain(leases_s=asked.leases_s, deadline_s=asked.deadline_s)
    return await shown(service, RunView.of(service.book, service.feed_failure))


@router.post(
    "/v1/admin/sweep",
    summary="Delete orphaned versions",
    responses=responses(*EVERYWHERE, NoPayloadRoot),
)
async def sweep(
    service: Service,
    dry_run: Annotated[
        bool, Query(description="Only say what would be deleted.", examples=[True])
    ] = True,
) -> Sweep:
    """Folders older than every live rollout and than step − max_off_policy_steps."""
    plans = await sweeping.sweep(service, dry_run=dry_run)
    return Sweep(
        dry_run=dry_run,
        keep_from=sweeping.sweep_rules(service.book).keep_from,
        versions=[SweptVersion.of(plan) for plan in plans],
    )
