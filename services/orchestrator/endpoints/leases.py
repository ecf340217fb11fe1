"""Leases: taken when a rollout is dispatched, renewed while it runs, ended if it is given up."""

from fastapi import APIRouter

from services.kit.problems import responses
from services.orchestrator.endpoints.parts import EVERYWHERE, LeasePath, Service, shown
from services.orchestrator.errors import (
    GroupClosed,
    GroupConflict,
    GroupFull,
    InvalidFileName,
    LeaseConflict,
    LeaseEnded,
    LeaseUnknown,
    PolicyBehind,
    PolicyUnknown,
    RunDraining,
    RunEnded,
    RunPaused,
    RunStopped,
    StorageFull,
    TooManyLeases,
    TooManyRollouts,
)
from services.orchestrator.leasing import LeaseRequest, find
from services.orchestrator.limits import LIST_ITEMS_MAX
from services.orchestrator.schemas import LeaseBody, Leases, LeaseView, RenewBody
from services.orchestrator.turns import file_problem
from sideband.ids import GroupId, LeaseId, RolloutId, SessionId

router = APIRouter(tags=["leases"])


@router.post(
    "/v1/leases",
    summary="Dispatch a rollout",
    responses=responses(
        *EVERYWHERE,
        RunPaused,
        RunDraining,
        RunEnded,
        RunStopped,
        LeaseConflict,
        GroupConflict,
        GroupFull,
        GroupClosed,
        PolicyUnknown,
        PolicyBehind,
        TooManyLeases,
        TooManyRollouts,
        StorageFull,
    ),
)
async def take_lease(body: LeaseBody, service: Service) -> LeaseView:
    """Fixes the policy version k of the rollout. Idempotent by rollout id."""
    lease = await service.take_lease(
        LeaseRequest(
            rollout_id=RolloutId(body.rollout_id),
            group_id=GroupId(body.group_id),
            group_size=body.group_size,
            env_name=body.env_name,
            session_id=None if body.session_id is None else SessionId(body.session_id),
        )
    )
    return LeaseView.of(lease, service.settings.run_id)


@router.get("/v1/leases", summary="Open leases", responses=responses(*EVERYWHERE))
async def list_leases(service: Service) -> Leases:
    """The oldest first."""
    leases = sorted(service.book.open_leases.values(), key=lambda lease: lease.index)
    views = [LeaseView.of(lease, service.settings.run_id) for lease in leases[:LIST_ITEMS_MAX]]
    return await shown(service, Leases(leases=views, count=len(leases)))


@router.get(
    "/v1/leases/{lease_id}", summary="One lease", responses=responses(*EVERYWHERE, LeaseUnknown)
)
async def get_lease(lease_id: LeasePath, service: Service) -> LeaseView:
    """Open or ended: an environment sees here that its rollout was cancelled."""
    view = LeaseView.of(find(service.book, LeaseId(lease_id)), service.settings.run_id)
    return await shown(service, view)


@router.post(
    "/v1/leases/{lease_id}/renew",
    summary="Keep a lease, and the files of its rollout",
    responses=responses(*EVERYWHERE, LeaseUnknown, LeaseEnded, InvalidFileName),
)
async def renew_lease(lease_id: LeasePath, body: RenewBody, service: Service) -> LeaseView:
    """Moves the deadline. The files named are deleted if the rollout is given up."""
    lease = find(service.book, LeaseId(lease_id))
    for file in body.files:
        problem = file_problem(file, service.book.rules.run_id, lease.policy_version)
        if problem:
            raise InvalidFileName(problem, file=file)
    renewed = await service.renew_lease(LeaseId(lease_id), body.files)
    return LeaseView.of(renewed, service.settings.run_id)


@router.delete(
    "/v1/leases/{lease_id}",
    summary="Give a rollout up",
    responses=responses(*EVERYWHERE, LeaseUnknown, LeaseEnded),
)
async def abort_lease(lease_id: LeasePath, service: Service) -> LeaseView:
    """Its known files are deleted, its session at the proxy is discarded. Idempotent."""
    lease = await service.abort_lease(LeaseId(lease_id))
    return LeaseView.of(lease, service.settings.run_id)
