"""Admin routes: engines, sessions, the policy version, pause, resume and drain."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query

from services.inference_proxy.endpoints.parts import Parts, PartsDep
from services.inference_proxy.errors import (
    RETRY_LATER,
    UnknownEngineProblem,
    UnknownSession,
    VersionConflict,
    VersionUnknown,
    as_problems,
)
from services.inference_proxy.limits import SHOWN_MAX
from services.inference_proxy.schemas import (
    Engines,
    EngineView,
    GateView,
    SessionDeleted,
    Sessions,
    VersionReport,
    Versions,
)
from services.inference_proxy.views import engine_views, sessions_view
from services.inference_proxy.workers.errors import WorkerSilent
from services.kit.problems import responses
from sideband.ids import ID_PATTERN, SessionId

router = APIRouter(tags=["admin"])

EngineName = Annotated[str, Path(description="Its name in the settings.", examples=["decode-0"])]
SessionPath = Annotated[
    str, Path(pattern=ID_PATTERN, description="The session.", examples=["rollout-7"])
]


@router.get(
    "/v1/engines", summary="Engines, their health and load", responses=responses(WorkerSilent)
)
async def list_engines(parts: PartsDep) -> Engines:
    """All engines in the order of the settings."""
    return Engines(engines=await parts.siblings.engines(engine_views(parts.book)))


@router.post(
    "/v1/engines/{name}/eject",
    summary="Take an engine out by hand",
    responses=responses(UnknownEngineProblem, WorkerSilent),
)
async def eject(name: EngineName, parts: PartsDep) -> EngineView:
    """It gets no new requests until it is returned; those it has go on. Idempotent."""
    with as_problems():
        parts.book.hold(name, "ejected by an administrator")
    await parts.siblings.publish()
    parts.pusher.wake()
    return await _engine(parts, name)


@router.post(
    "/v1/engines/{name}/return",
    summary="Bring an engine back",
    responses=responses(UnknownEngineProblem, WorkerSilent),
)
async def return_engine(name: EngineName, parts: PartsDep) -> EngineView:
    """One probe is made at once; it serves when that succeeds. Idempotent."""
    with as_problems():
        engine = parts.book.release(name)
    await asyncio.gather(parts.probes.probe(engine), parts.siblings.publish())
    return await _engine(parts, name)


@router.get("/v1/sessions", summary="Sessions, the latest last", responses=responses(WorkerSilent))
async def list_sessions(
    parts: PartsDep,
    limit: Annotated[
        int, Query(ge=1, le=SHOWN_MAX, description="Most sessions shown.", examples=[100])
    ] = 100,
) -> Sessions:
    """The most recently used ones."""
    return await parts.siblings.sessions(sessions_view(parts.sessions, limit=limit), limit=limit)


@router.delete(
    "/v1/sessions/{session_id}",
    summary="Discard a session, its running requests and its files",
    responses=responses(UnknownSession),
)
async def delete_session(
    session_id: SessionPath,
    parts: PartsDep,
    delete_files: Annotated[
        bool, Query(description="Delete the files that its answers named.", examples=[True])
    ] = False,
) -> SessionDeleted:
    """Cancels what runs. With `delete_files` nothing that its answers named stays."""
    session = parts.sessions.discard(SessionId(session_id))
    if session is None:
        raise UnknownSession(f"no session {session_id} is known")
    parts.keeper.turns.discard_session(session.session_id)
    if delete_files:
        parts.janitor.discard(
            policy_version=session.policy_version,
            files=session.files,
            reason="discarded_session",
        )
    return SessionDeleted(
        session_id=session_id,
        files_discarded=len(session.files) if delete_files else 0,
        requests_cancelled=session.in_flight,
    )


@router.get(
    "/v1/policy-version",
    summary="What the engines have applied",
    responses=responses(VersionUnknown),
)
async def get_versions(parts: PartsDep) -> Versions:
    """The one source of truth of the policy version. A proxy that was started anew says nothing
    before it has learnt what the orchestrator has on record.
    """
    if not parts.pusher.settled.is_set():
        raise VersionUnknown(
            "The orchestrator has not told the policy version yet.", headers=RETRY_LATER
        )
    return _versions(parts)


@router.post(
    "/v1/policy-version",
    summary="Report that engines have applied new weights",
    responses=responses(UnknownEngineProblem, VersionConflict, WorkerSilent),
)
async def report_version(report: VersionReport, parts: PartsDep) -> Versions:
    """Called by whoever updates the weights. What all serving engines have is pushed on to the
    orchestrator, with retry. All engines named are changed, or none.
    """
    with as_problems():
        engines = parts.book.named(report.engines)
    processes = await parts.asking.processes(engines)
    with as_problems():
        parts.book.report(
            report.policy_version, report.engines, force=report.force, processes=processes
        )
    parts.metrics.policy_version_applied.set(parts.book.applied)
    await parts.siblings.publish()
    parts.pusher.wake()
    return _versions(parts)


@router.post("/v1/admin/pause", summary="Take no new requests", responses=responses(WorkerSilent))
async def pause(parts: PartsDep) -> GateView:
    """Requests that run go on; new ones get a 503."""
    parts.gate.pause()
    await parts.siblings.publish()
    return await _gate(parts)


@router.post("/v1/admin/resume", summary="Take requests again", responses=responses(WorkerSilent))
async def resume(parts: PartsDep) -> GateView:
    """Also after a drain."""
    parts.gate.resume()
    await parts.siblings.publish()
    return await _gate(parts)


@router.post(
    "/v1/admin/drain",
    summary="Finish what runs, take nothing new",
    responses=responses(WorkerSilent),
)
async def drain(
    parts: PartsDep,
    timeout_s: Annotated[
        float, Query(ge=0, le=3600, description="Longest wait.", examples=[30.0])
    ] = 30.0,
) -> GateView:
    """Returns when nothing runs any more, or at the deadline."""
    parts.gate.begin_drain()
    await parts.siblings.publish()
    here, elsewhere = await asyncio.gather(
        parts.gate.drain(timeout_s=timeout_s), parts.siblings.drain(timeout_s=timeout_s)
    )
    if not elsewhere and parts.gate.state == "drained":
        parts.gate.begin_drain()  # something runs yet
    await parts.siblings.publish()
    return await _gate(parts, is_complete=here and elsewhere)


async def _engine(parts: Parts, name: str) -> EngineView:
    views = await parts.siblings.engines(engine_views(parts.book))
    return next(view for view in views if view.name == name)


def _versions(parts: Parts) -> Versions:
    return Versions(
        applied=parts.siblings.applied(parts.book.applied),
        engines={engine.name: engine.policy_version for engine in parts.book},
        pushed=parts.pusher.pushed,
        push_failures=parts.pusher.failures,
    )


async def _gate(parts: Parts, *, is_complete: bool = True) -> GateView:
    gate = parts.gate
    in_flight = gate.in_flight + await parts.siblings.in_flight()
    return GateView(state=gate.state, in_flight=in_flight, is_complete=is_complete)
