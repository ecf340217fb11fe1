"""The phases of a run. Pure.

running ⇄ paused → draining → ended;  any of these → stopped. ``ended`` and ``stopped`` are
terminal and say why; a stopped run is reopened into the phase that the fault found it in, once its
cause is gone. A drain has two deadlines:
by the first the open leases end, by the second the run, whatever the trainer and the policy do.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from services.kit.problems import Problem
from services.orchestrator.errors import RunDraining, RunEnded, RunPaused, RunStopped


class Phase(StrEnum):
    """Where the run is."""

    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    ENDED = "ended"
    STOPPED = "stopped"


TERMINAL: Final = frozenset({Phase.ENDED, Phase.STOPPED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Phase, why, and the deadlines of a drain. ``stopped_in`` is where a fault found it."""

    phase: Phase = Phase.RUNNING
    reason: str = ""
    stopped_in: Phase | None = None
    leases_until_s: float | None = None
    drain_until_s: float | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more will be trained."""
        return self.phase in TERMINAL

    def lease_problem(self) -> Problem | None:
        """Why no lease is given now; None when one may be."""
        match self.phase:
            case Phase.RUNNING:
                return None
            case Phase.PAUSED:
                return RunPaused("The dispatcher is paused.", headers={"Retry-After": "5"})
            case Phase.DRAINING:
                return RunDraining("The run takes no new rollouts.")
            case Phase.ENDED:
                return RunEnded(f"The run has ended: {self.reason}.", reason=self.reason)
            case Phase.STOPPED:
                return RunStopped(f"The run has stopped: {self.reason}.", reason=self.reason)

    def paused(self) -> "Run":
        """No new leases; everything else goes on. Only a running one pauses; a stopped one that
        ran is paused once it is reopened.
        """
        if self.phase is Phase.STOPPED and self._goes_on_in is Phase.RUNNING:
            return replace(self, stopped_in=Phase.PAUSED)
        return replace(self, phase=Phase.PAUSED) if self.phase is Phase.RUNNING else self

    def resumed(self) -> "Run":
        """Leases again. Only a paused one resumes."""
        return replace(self, phase=Phase.RUNNING) if self.phase is Phase.PAUSED else self

    def reopened(self) -> "Run":
        """The cause of a stop is gone: on as before, with what was asked of it. Only a stopped
        one.
        """
        if self.phase is not Phase.STOPPED:
            return self
        reason = f"reopened after: {self.reason}"
        return replace(self, phase=self._goes_on_in, reason=reason, stopped_in=None)

    @property
    def _goes_on_in(self) -> Phase:
        """Where a stopped run is reopened. An earlier version did not note where it was."""
        if self.stopped_in is not None:
            return self.stopped_in
        return Phase.RUNNING if self.drain_until_s is None else Phase.DRAINING

    def draining(self, *, leases_until_s: float, drain_until_s: float) -> "Run":
        """Take no new rollouts, end by ``drain_until_s``. Repeating it only brings it forward."""
        if self.is_terminal:
            return self
        if self.phase is Phase.DRAINING:
            assert self.leases_until_s is not None
            assert self.drain_until_s is not None
            leases_until_s = min(leases_until_s, self.leases_until_s)
            drain_until_s = min(drain_until_s, self.drain_until_s)
        return Run(
            phase=Phase.DRAINING,
            leases_until_s=min(leases_until_s, drain_until_s),
            drain_until_s=drain_until_s,
        )

    def ended(self, reason: str) -> "Run":
        """Terminal, as wanted."""
        return self if self.is_terminal else replace(self, phase=Phase.ENDED, reason=reason)

    def stopped(self, reason: str) -> "Run":
        """Terminal, by a fault; the first reason stands."""
        if self.is_terminal:
            return self
        return replace(self, phase=Phase.STOPPED, reason=reason, stopped_in=self.phase)
