"""Builds the bodies of steps again that an earlier process had built. The ledger has their samples.

Equal samples give equal bytes, so a rank that has read a part of a step before goes on with the
same one; the recorded digest proves it.
"""

import asyncio
from dataclasses import replace

import structlog
from msgspec import structs

from services.orchestrator.advantages import advantaged
from services.orchestrator.building import BuildRules, build
from services.orchestrator.ledger import LedgerError
from services.orchestrator.records import Change, Draft, Rollout, StepRecord, StepState
from services.orchestrator.service import Orchestrator
from services.orchestrator.stepping import Built
from sideband.errors import InvalidInput

log = structlog.get_logger(__name__)
UNFINISHED = frozenset({StepState.BUILT, StepState.SHIPPED})


def build_rules(service: Orchestrator) -> BuildRules:
    """How steps are built, new ones too."""
    return BuildRules(
        run_id=service.book.rules.run_id,
        model=service.model,
        plan=service.plan,
        routing_valid_fraction_min=service.settings.routing_valid_fraction_min,
        mask_valid_fraction_min=service.settings.mask_valid_fraction_min,
    )


async def rebuild_steps(service: Orchestrator, rules: BuildRules) -> None:
    """Give unfinished steps their bodies. A step that cannot have one stops the run."""
    problem = await rebuild_next(service, rules)
    if problem is not None:
        await service.stop(problem)
    service.to_ship.set()


async def rebuild_next(service: Orchestrator, rules: BuildRules) -> str | None:
    """Why a step cannot have its body; None when the next few have theirs.

    After the trainer went back there may be many more.
    """
    steps = [r.step for r in service.book.open_steps.values() if r.state in UNFINISHED]
    for step in sorted(steps)[: service.book.rules.steps_ahead_max]:
        record = service.book.open_steps.get(step)
        if record is not None and record.state in UNFINISHED and not record.body:
            problem = await _rebuild(service, rules, record)
            if problem is not None:
                return problem
    return None


async def _rebuild(service: Orchestrator, rules: BuildRules, record: StepRecord) -> str | None:
    try:
        found = await service.ledger.samples(record.rollout_ids)
    except LedgerError as exc:
        service.journal.give_up(str(exc))
        await service.settled()  # raises
        raise
    missing = [name for name in record.rollout_ids if name not in found]
    if missing or not found:
        return f"step {record.step} cannot be built again: no samples of {missing or 'it'}"
    rollouts = []
    for name in record.rollout_ids:
        rollout = structs.replace(service.book.rollouts[name], samples=found[name])
        rollouts.append(_with_advantage(rollout))
    draft = Draft(step=record.step, rollouts=tuple(rollouts))
    try:
        built = await asyncio.to_thread(build, draft, rules)
    except InvalidInput as exc:
        return f"step {record.step} cannot be built again: {exc}"
    return await _take(service, record, built)


def _with_advantage(rollout: Rollout) -> Rollout:
    return rollout if rollout.advantage is None else advantaged(rollout, rollout.advantage)


async def _take(service: Orchestrator, record: StepRecord, built: Built) -> str | None:
    now = service.book.open_steps.get(record.step)
    if now is None or now.state not in UNFINISHED:
        return None  # committed by every rank meanwhile
    if now.rollout_ids != record.rollout_ids:
        return None  # the trainer went back meanwhile: it is built again
    if built.digest == record.digest:
        service.book.open_steps[record.step] = service.book.steps[record.step] = replace(
            now, body=built.body
        )
        log.info("step_rebuilt", step=record.step)
        return None
    if now.state is StepState.SHIPPED:
        return (
            f"step {record.step} was shipped as {record.digest[:12]}, the same rollouts now give "
            f"{built.digest[:12]}: settings or version have changed"
        )
    with service.decision() as change:
        _replace_body(service, change, now, built)
    await service.commit(change)
    log.warning("step_rebuilt_differently", step=record.step)
    return None


def _replace_body(service: Orchestrator, change: Change, record: StepRecord, built: Built) -> None:
    rebuilt = replace(
        record,
        body=built.body,
        digest=built.digest,
        size_bytes=len(built.body),
        micro_batches=built.micro_batches,
    )
    service.book.put_step(change, rebuilt)
