"""Steps and files: what trains on what, and why a file is kept."""

from typing import Annotated

from fastapi import APIRouter, Query

from services.kit.problems import responses
from services.orchestrator.admin_schemas import Files, FileView
from services.orchestrator.endpoints.parts import EVERYWHERE, Service, StepPath, shown
from services.orchestrator.errors import InvalidFileName, StepUnknown
from services.orchestrator.limits import LIST_ITEMS_MAX
from services.orchestrator.schemas import Steps, StepView
from services.orchestrator.service import Orchestrator
from services.orchestrator.turns import file_problem

router = APIRouter(tags=["steps and files"])


@router.get("/v1/steps", summary="Steps by number", responses=responses(*EVERYWHERE))
async def list_steps(service: Service) -> Steps:
    """The last ones."""
    records = sorted(service.book.steps.values(), key=lambda record: record.step)
    views = [StepView.of(record) for record in records[-LIST_ITEMS_MAX:]]
    return await shown(service, Steps(steps=views, next_step=service.book.next_step))


@router.get("/v1/steps/{step}", summary="One step", responses=responses(*EVERYWHERE, StepUnknown))
async def get_step(step: StepPath, service: Service) -> StepView:
    """Its state, its rollouts, its files."""
    record = service.book.steps.get(step)
    if record is None:
        raise StepUnknown(f"No step {step}.", step=step)
    return await shown(service, StepView.of(record))


@router.get(
    "/v1/files",
    summary="What keeps a file, or all that is kept",
    responses=responses(*EVERYWHERE, InvalidFileName),
)
async def list_files(
    service: Service,
    file: Annotated[
        str | None,
        Query(
            max_length=1024,
            description="One file, relative to the payload root.",
            examples=["v3/run/a1/g7.r0.t0-0123456789abcdef.sbp"],
        ),
    ] = None,
) -> Files:
    """Each file with its holders: lease, rollout, group (for other choices), step."""
    retention = service.book.retention
    if file is None:
        names = retention.held_files()
    else:
        problem = file_problem(file, service.book.rules.run_id, None)
        if problem:
            raise InvalidFileName(problem, file=file)
        names = [file]
    views = [await _view(service, name) for name in names[:LIST_ITEMS_MAX]]
    return await shown(service, Files(files=views, count=retention.held_count))


async def _view(service: Orchestrator, file: str) -> FileView:
    holders = service.book.retention.why(file)
    size_bytes = None
    if service.files is not None:
        size_bytes = await service.files.size(file)
    return FileView(
        file=file,
        is_kept=bool(holders),
        is_given_up=service.book.retention.is_given_up(file),
        kept_by=[str(holder) for holder in holders],
        size_bytes=size_bytes,
    )
