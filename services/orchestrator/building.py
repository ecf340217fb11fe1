"""A draft becomes the body that the feed gets. Pure and slow: the service calls it in a thread."""

import hashlib
from dataclasses import dataclass

from services.orchestrator.records import Draft
from services.orchestrator.stepping import Built
from sideband.batch.packing import PackingPlan, plan_rows
from sideband.errors import InvalidInput
from sideband.feed.codec import Step, encode_step
from sideband.ids import RunId
from sideband.model import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRules:
    """How steps are packed, and how much of their rows may be missing."""

    run_id: RunId
    model: ModelShape | None
    plan: PackingPlan
    routing_valid_fraction_min: float
    mask_valid_fraction_min: float


def build(draft: Draft, rules: BuildRules) -> Built:
    """Pack and encode. Equal drafts give equal bytes."""
    samples = [sample for rollout in draft.rollouts for sample in rollout.samples]
    step = Step(
        run_id=rules.run_id,
        step=draft.step,
        model=rules.model,
        dp_size=rules.plan.dp_size,
        cp_size=rules.plan.cp_size,
        layout=rules.plan.layout,
        grid=plan_rows(samples, rules.plan),  # one row in memory at a time
    )
    body = encode_step(step)
    return Built(
        body=body, digest=hashlib.sha256(body).hexdigest(), micro_batches=step.micro_batch_count
    )


def build_or_say(draft: Draft, rules: BuildRules) -> Built | str:
    """The step, or why it must not or cannot be built."""
    problem = validity_problem(draft, rules)
    if problem is not None:
        return problem
    try:
        return build(draft, rules)
    except InvalidInput as exc:
        return f"step {draft.step} cannot be built: {exc}"


def validity_problem(draft: Draft, rules: BuildRules) -> str | None:
    """Why the step must not train: too few of its rows are there. None when it may."""
    tally = draft.tally
    for name, fraction, least in (
        ("routing rows", tally.routing_valid_fraction, rules.routing_valid_fraction_min),
        ("sampling masks", tally.mask_valid_fraction, rules.mask_valid_fraction_min),
    ):
        if fraction < least:
            return f"step {draft.step} has {fraction:.3f} of its {name}, at least {least} must be"
    return None
