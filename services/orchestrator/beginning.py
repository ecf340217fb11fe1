"""Whether a start begins a run anew. Pure.

A supervisor starts a process again with the settings of before, ``fresh`` among them: what was
begun by them must not be wiped by the next start.
"""

from typing import Literal

from services.orchestrator.lifecycle import Phase
from services.orchestrator.records import Records
from sideband.errors import SidebandError
from sideband.ids import RunId


class RunBegun(SidebandError):
    """``fresh`` would wipe a run that has work and has not ended, and nobody said that it may."""

    def __init__(self, run_id: RunId, *, rollouts: int, steps: int) -> None:
        self.run_id, self.rollouts, self.steps = run_id, rollouts, steps
        super().__init__(
            f"run {run_id} is begun and has not ended ({rollouts} rollouts, {steps} steps): start "
            "with SIDEBAND_ORCHESTRATOR_START=resume to go on with it, or give another "
            "SIDEBAND_ORCHESTRATOR_START_ID to wipe it"
        )


class StartOutdated(SidebandError):
    """``fresh`` would wipe what was begun or led under an id that came after this one."""

    def __init__(self, start_id: str, *, latest: str | None) -> None:
        self.start_id, self.latest = start_id, latest
        super().__init__(
            f"start {start_id} is older than start {latest}, so it wipes nothing: give "
            "SIDEBAND_ORCHESTRATOR_START_ID what is new, or go on with "
            "SIDEBAND_ORCHESTRATOR_START=resume"
        )


class StartRefused(SidebandError):
    """The run cannot go back to the step that the settings name."""

    def __init__(self, *, step: int, start_id: str, reason: str) -> None:
        self.step, self.start_id, self.reason = step, start_id, reason
        super().__init__(
            f"start {start_id} cannot go back to step {step}: {reason} It is asked for by "
            "SIDEBAND_ORCHESTRATOR_RESUME_FROM_STEP and SIDEBAND_ORCHESTRATOR_START_ID"
        )


def begins_anew(
    records: Records | None,
    *,
    start: Literal["fresh", "resume"],
    start_id: str | None,
    run_id: RunId,
) -> bool:
    """Whether what the ledger and the root have of the run is wiped.

    A start with an id goes on with the run that it began, whatever that is at, and wipes one that
    another began, if it is the newest. One without an id wipes only what has ended or holds no
    work. Raises RunBegun, StartOutdated.
    """
    if start == "resume":
        return False
    if records is None:
        return True
    begun_by = None if records.start is None else records.start.start_id
    if start_id is not None and start_id != begun_by and records.is_older_start(start_id):
        raise StartOutdated(start_id, latest=records.latest_start)
    if start_id is not None and records.start is not None:
        return start_id != begun_by
    has_work = bool(records.leases or records.rollouts or records.steps)
    if has_work and records.run.phase != Phase.ENDED.value:
        raise RunBegun(run_id, rollouts=len(records.rollouts), steps=len(records.steps))
    return True
