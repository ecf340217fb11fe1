"""What the decisions on a book go by."""

from dataclasses import dataclass

from services.orchestrator.membership import StepSize
from sideband.ids import RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Settings that do not change during a run."""

    run_id: RunId
    step_size: StepSize
    max_off_policy_steps: int
    is_deterministic: bool
    filter_zero_advantage: bool
    ship_last_partial_step: bool
    first_step: int
    lease_timeout_s: float
    group_timeout_s: float
    policy_timeout_s: float
    leases_open_max: int
    rollouts_held_max: int
    steps_ahead_max: int  # built and not yet committed by every rank
    history_max: int  # ended leases, rollouts and steps that are still known by id
    steps_kept: int = 0  # done steps whose files are kept for a trainer that goes back
