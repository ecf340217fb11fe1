"""What the orchestrator refuses, and the only place that knows HTTP statuses.

Problem
├── LeaseRefused (409)
│   ├── RunPaused, RunDraining, RunEnded, RunStopped
│   ├── LeaseConflict        the rollout's lease was taken with other facts
│   ├── LeaseEnded           renewing or aborting what has ended
│   └── GroupConflict, GroupFull, GroupClosed
├── LeaseUnknown, RolloutUnknown, StepUnknown (404)
├── RolloutConflict (409)    the id was delivered with another body
├── CausePersists (409)      what stopped the run is still so
├── RolloutInStep (409)      too late to drop it: a rank may have to read its files
├── PolicyUnknown, PolicyBehind, TooManyLeases, TooManyRollouts (503, with Retry-After)
├── LedgerBehind, LedgerUnavailable, NotLeading, StorageFull (503, with Retry-After)
├── TurnsMissing, NoProxy, ProxyUnavailable: ``reference_errors``
├── ReadersBusy, ReaderLost (503, with Retry-After): ``kit.readers.pool``
├── StepNotCommitted, LineageConflict, NotDurable, StepsMoving: ``return_errors``
├── UnsupportedForm (415)    neither of the two forms of a rollout
├── NoPayloadRoot (409)      a file operation in an inline run
├── InvalidFileName (422)
└── RolloutRefused (422)     nothing of it is kept, its files are deleted
    ├── MalformedTurn, MixedForms, OverlappingSegments
    ├── InvalidSegment       cannot exist, is not of this run, version, folder or model
    ├── SegmentNotInFile     the file says something else, or is not readable
    ├── InvalidInline        inline rows or masks that do not fit tokens or model
    ├── ModelMismatch, NoModel
    ├── MissingAdvantage
    └── MissingMask          with the strict setting
"""

from services.kit.problems import Problem
from sideband.ids import GroupId, LeaseId, RolloutId

RETRY_SOON = {"Retry-After": "1"}


class LeaseRefused(Problem):
    """No new lease."""

    status, code, title = 409, "lease_refused", "Lease refused"


class RunPaused(LeaseRefused):
    """The dispatcher is paused; running rollouts are still taken."""

    code, title = "run_paused", "Run paused"


class RunDraining(LeaseRefused):
    """The run takes no new rollouts and ends."""

    code, title = "run_draining", "Run draining"


class RunEnded(LeaseRefused):
    """The run has ended."""

    code, title = "run_ended", "Run ended"


class RunStopped(LeaseRefused):
    """The run stopped itself; the detail says why."""

    code, title = "run_stopped", "Run stopped"


class LeaseConflict(LeaseRefused):
    """The rollout already has a lease, taken with other facts."""

    code, title = "lease_conflict", "Lease conflict"

    def __init__(self, rollout_id: RolloutId) -> None:
        super().__init__(
            f"Rollout {rollout_id} has a lease with another group or environment.",
            rollout_id=rollout_id,
        )


class LeaseEnded(LeaseRefused):
    """The lease is not open any more."""

    code, title = "lease_ended", "Lease ended"

    def __init__(self, lease_id: LeaseId, state: str) -> None:
        super().__init__(f"Lease {lease_id} is {state}.", lease_id=lease_id, state=state)


class GroupConflict(LeaseRefused):
    """The group was opened with another size."""

    code, title = "group_conflict", "Group conflict"

    def __init__(self, group_id: GroupId, *, known: int, given: int) -> None:
        super().__init__(
            f"Group {group_id} has {known} members, not {given}.", known=known, given=given
        )


class GroupFull(LeaseRefused):
    """All members of the group have leases and none of them failed."""

    code, title = "group_full", "Group full"

    def __init__(self, group_id: GroupId, *, size: int) -> None:
        super().__init__(f"Group {group_id} has all its {size} members.", size=size)


class GroupClosed(LeaseRefused):
    """The group is complete; its advantages are computed."""

    code, title = "group_closed", "Group closed"

    def __init__(self, group_id: GroupId) -> None:
        super().__init__(f"Group {group_id} is complete.", group_id=group_id)


class LeaseUnknown(Problem):
    """No lease of this id."""

    status, code, title = 404, "lease_unknown", "Lease unknown"


class RolloutUnknown(Problem):
    """No rollout of this id."""

    status, code, title = 404, "rollout_unknown", "Rollout unknown"


class StepUnknown(Problem):
    """No step of this number."""

    status, code, title = 404, "step_unknown", "Step unknown"


class RolloutConflict(Problem):
    """The id was delivered before with another body."""

    status, code, title = 409, "rollout_conflict", "Rollout conflict"

    def __init__(self, rollout_id: RolloutId) -> None:
        super().__init__(
            f"Rollout {rollout_id} was delivered before with another body.", rollout_id=rollout_id
        )


class RolloutInStep(Problem):
    """The rollout lies in a step: a rank may have to read its files."""

    status, code, title = 409, "rollout_in_step", "Rollout in a step"

    def __init__(self, rollout_id: RolloutId, step: int | None) -> None:
        super().__init__(f"Rollout {rollout_id} lies in step {step}.", step=step)


class CausePersists(Problem):
    """The run stays stopped: what stopped it, or something like it, is still so."""

    status, code, title = 409, "cause_persists", "Cause persists"


class PolicyUnknown(Problem):
    """No proxy has said yet which policy version the engines have applied."""

    status, code, title = 503, "policy_unknown", "Policy version unknown"


class PolicyBehind(Problem):
    """The engines' policy is so old that a rollout of it would be stale before it is done."""

    status, code, title = 503, "policy_behind", "Policy version behind"


class TooManyLeases(Problem):
    """As many leases are open as the settings admit."""

    status, code, title = 503, "too_many_leases", "Too many open leases"


class TooManyRollouts(Problem):
    """As many rollouts are held as the settings admit: the trainer is behind."""

    status, code, title = 503, "too_many_rollouts", "Too many held rollouts"


class LedgerBehind(Problem):
    """More changes wait for the ledger than may."""

    status, code, title = 503, "ledger_behind", "Ledger behind"


class LedgerUnavailable(Problem):
    """The ledger cannot be written: nothing that was asked is known to be kept. Ask again."""

    status, code, title = 503, "ledger_unavailable", "Ledger unavailable"


class StorageFull(Problem):
    """The payload root is too full for new work; ``late_ranks`` are what holds its files."""

    status, code, title = 503, "storage_full", "Storage full"


class NotLeading(Problem):
    """Another orchestrator leads the run; ``leader`` says which."""

    status, code, title = 503, "not_leading", "Not leading"


class UnsupportedForm(Problem):
    """A content type that is neither JSON nor the binary form."""

    status, code, title = 415, "unsupported_form", "Unsupported form"


class NoPayloadRoot(Problem):
    """The run has no payload root: everything is inline."""

    status, code, title = 409, "no_payload_root", "No payload root"


class InvalidFileName(Problem):
    """Not the name of a payload file of this run."""

    status, code, title = 422, "invalid_file_name", "Invalid file name"


class RolloutRefused(Problem):
    """A rollout whose content breaks a rule. Its lease ends, its files are deleted."""

    status, code, title = 422, "rollout_refused", "Rollout refused"


class MalformedTurn(RolloutRefused):
    """A turn whose arrays do not fit each other, or hold impossible values."""

    code, title = "malformed_turn", "Malformed turn"


class MixedForms(RolloutRefused):
    """Some turns by handle, others inline."""

    code, title = "mixed_forms", "Mixed forms"


class InvalidSegment(RolloutRefused):
    """A segment that cannot exist, or is not of this run, policy version, folder or model."""

    code, title = "invalid_segment", "Invalid segment"


class OverlappingSegments(RolloutRefused):
    """Two segments of one field give a row for the same position of a turn."""

    code, title = "overlapping_segments", "Overlapping segments"


class SegmentNotInFile(RolloutRefused):
    """The payload file does not hold what the segment says, or cannot be read."""

    code, title = "segment_not_in_file", "Segment not in its file"


class InvalidInline(RolloutRefused):
    """Inline rows or masks that do not fit the tokens or the model."""

    code, title = "invalid_inline", "Invalid inline rows"


class ModelMismatch(RolloutRefused):
    """The engine's model is not the run's."""

    code, title = "model_mismatch", "Model mismatch"


class NoModel(RolloutRefused):
    """Rows or masks in a run without a model config."""

    code, title = "no_model", "No model"


class MissingAdvantage(RolloutRefused):
    """Neither a reward nor an advantage, or both where only one can hold."""

    code, title = "missing_advantage", "Missing advantage"


class MissingMask(RolloutRefused):
    """Sampling cut the vocabulary, and a trained token has no kept set (strict setting)."""

    code, title = "missing_mask", "Missing mask"


_REFUSALS: list[type[RolloutRefused]] = [RolloutRefused, *RolloutRefused.__subclasses__()]
REFUSALS = {kind.code: kind for kind in _REFUSALS}
