"""The orchestrator's state and the transitions that others build on. Pure: no I/O, no clock.

``leasing``, ``collecting``, ``stepping`` and ``ending`` hold the decisions; each changes a ``Book``
and writes what it did into a ``Change``.

Invariants: a rollout is held (waiting or ready) exactly while holder ``rollout <id>`` may keep
files; a step's files are held by ``step <s>`` before its rollouts let go; what ends, ends once.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Final

from msgspec import structs

from services.orchestrator.advantages import advantaged
from services.orchestrator.groups import GroupResult, Groups
from services.orchestrator.history import PolicyRecord, ReturnRecord
from services.orchestrator.lifecycle import Run
from services.orchestrator.records import (
    HELD_STATES,
    Change,
    Draft,
    DropReason,
    Lease,
    LeaseState,
    Rollout,
    RolloutState,
    RunRecord,
    StepRecord,
    StepState,
)
from services.orchestrator.retention import Holder, Retention
from services.orchestrator.rules import Rules
from services.orchestrator.staleness import is_stale
from sideband.feed.ancestry import Line, line_after
from sideband.ids import LeaseId, RolloutId, SessionId

ENDED_STATES: Final = frozenset(LeaseState) - {LeaseState.OPEN}
ENDED_ROLLOUT_STATES: Final = frozenset({RolloutState.DROPPED, RolloutState.TRAINED})


class Book:
    """Leases, groups, rollouts, steps, files, policy version and phase of one run."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.run = Run()
        self.policy_version: int | None = None  # the least over the serving engines, now
        self.policy_applied = 0  # the highest that was ever applied everywhere
        self.policy_before: int | None = None  # of a lineage that was left, until engines leave it
        self.policies: deque[PolicyRecord] = deque()  # that the engines served, the latest last
        self.returns: list[ReturnRecord] = []  # of the trainer, to earlier checkpoints
        self.leases: dict[LeaseId, Lease] = {}
        self.open_leases: dict[LeaseId, Lease] = {}
        self.lease_of: dict[RolloutId, LeaseId] = {}
        self.leases_of_session: dict[SessionId, set[LeaseId]] = {}  # also of ended ones
        self.rollouts: dict[RolloutId, Rollout] = {}
        self.held: dict[RolloutId, Rollout] = {}  # waiting or ready
        self.groups = Groups(closed_max=rules.history_max)
        self.steps: dict[int, StepRecord] = {}
        self.open_steps: dict[int, StepRecord] = {}  # not closed
        self.draft: Draft | None = None  # decided, not yet built
        self.retention = Retention(steps_kept=rules.steps_kept)
        self.next_step = rules.first_step
        self.next_lease_index = 0
        self.next_ready_index = 0
        # In the order in which they ended: the oldest is forgotten without a walk over the rest.
        self._ended_leases: OrderedDict[LeaseId, None] = OrderedDict()
        self._ended_rollouts: OrderedDict[RolloutId, None] = OrderedDict()
        self._closed_steps: OrderedDict[int, None] = OrderedDict()
        self._sealed: RunRecord | None = None

    def put_lease(self, change: Change, lease: Lease) -> None:
        """Record a new lease, or how one ended; ended ones are forgotten beyond the bound."""
        self.leases.pop(lease.lease_id, None)  # so that the order is that of the last change
        self.leases[lease.lease_id] = lease
        self.lease_of[lease.rollout_id] = lease.lease_id
        if lease.session_id is not None:
            self.leases_of_session.setdefault(lease.session_id, set()).add(lease.lease_id)
        if lease.state is LeaseState.OPEN:
            self.open_leases[lease.lease_id] = lease
        else:
            self.open_leases.pop(lease.lease_id, None)
        change.leases.append(lease)
        self._ended_leases.pop(lease.lease_id, None)
        if lease.state in ENDED_STATES:
            self._ended_leases[lease.lease_id] = None
        self._forget_leases(change)

    def _forget_leases(self, change: Change) -> None:
        """Forget the oldest that ended, beyond the bound; not while their rollouts need files.

        It is by their leases that a session is known to be shared.
        """
        surplus = len(self._ended_leases) - self.rules.history_max
        if surplus <= 0:
            return
        newest = next(reversed(self._ended_leases))  # its end is still being said
        spare = (
            lease_id
            for lease_id in self._ended_leases
            if lease_id != newest and not self._needs_files(self.leases[lease_id].rollout_id)
        )
        for oldest in list(islice(spare, surplus)):
            del self._ended_leases[oldest]
            self._forget_lease(self.leases.pop(oldest))
            change.leases_forgotten.append(oldest)

    def _needs_files(self, rollout_id: RolloutId) -> bool:
        """Whether the rollout may still train, or a trainer may go back to its step."""
        rollout = self.rollouts.get(rollout_id)
        if rollout is None or rollout.state is RolloutState.DROPPED:
            return False
        return rollout.state is not RolloutState.TRAINED or rollout.step in self.open_steps

    def _forget_lease(self, lease: Lease) -> None:
        del self.lease_of[lease.rollout_id]
        if lease.session_id is not None:
            sharing = self.leases_of_session[lease.session_id]
            sharing.discard(lease.lease_id)
            if not sharing:
                del self.leases_of_session[lease.session_id]

    def discard_session(self, change: Change, lease: Lease) -> None:
        """Have the proxy delete what the lease's session wrote, also what no turn named.

        Not when a rollout of another choice of the same requests may still train on it: then what
        no turn named is left to the sweep.
        """
        if lease.session_id is None:
            return
        for lease_id in self.leases_of_session.get(lease.session_id, set()) - {lease.lease_id}:
            other = self.leases[lease_id]
            rollout = self.rollouts.get(other.rollout_id)
            is_kept = rollout is not None and rollout.state is not RolloutState.DROPPED
            if is_kept or other.state is LeaseState.OPEN:
                return
        change.discard_sessions.append(lease.session_id)

    def put_rollout(self, change: Change, rollout: Rollout) -> None:
        """Record a rollout's new state."""
        self.rollouts.pop(rollout.rollout_id, None)  # so that the order is that of the last change
        self.rollouts[rollout.rollout_id] = rollout
        self.held.pop(rollout.rollout_id, None)
        if rollout.state in HELD_STATES:
            self.held[rollout.rollout_id] = rollout
        change.rollouts.append(rollout)
        self._ended_rollouts.pop(rollout.rollout_id, None)
        if rollout.state in ENDED_ROLLOUT_STATES:
            self._ended_rollouts[rollout.rollout_id] = None
        self._forget_rollouts(change)
        self._forget_leases(change)

    def _forget_rollouts(self, change: Change) -> None:
        """Forget the oldest that ended, beyond the bound; not while their step is open."""
        while len(self._ended_rollouts) > self.rules.history_max:
            oldest = next(iter(self._ended_rollouts))
            if self.rollouts[oldest].step in self.open_steps:
                return
            del self._ended_rollouts[oldest], self.rollouts[oldest]
            change.rollouts_forgotten.append(oldest)

    def put_step(self, change: Change, record: StepRecord) -> None:
        """Record a step's new state; closed ones are forgotten beyond the bound."""
        self.steps[record.step] = record
        change.steps.append(record)
        if record.state is not StepState.CLOSED:
            self.open_steps[record.step] = record
            return
        self.open_steps.pop(record.step, None)
        self._forget_rollouts(change)
        self._forget_leases(change)
        self._closed_steps[record.step] = None
        while len(self._closed_steps) > self.rules.history_max:
            self.forget_step(change, next(iter(self._closed_steps)))

    def forget_step(self, change: Change, step: int) -> None:
        """Nobody asks for the step any more, or its number is free again."""
        self._closed_steps.pop(step, None)
        self.open_steps.pop(step, None)
        del self.steps[step]
        change.steps_forgotten.append(step)

    @property
    def lineage(self) -> int:
        """How often the trainer went back."""
        return self.returns[-1].lineage if self.returns else 0

    @property
    def line(self) -> Line:
        """The returns that still bound which checkpoints are of the run."""
        line: Line = ()
        for record in self.returns:
            line = record.line or line_after(line, lineage=record.lineage, step=record.step)
        return line

    def seal(self, change: Change) -> None:
        """Complete a change with what its decisions do not name: groups, phase, counters.

        To be called once after each decision, before its change is made durable.
        """
        self.groups.take_changes(change)
        change.groups = [
            replace(group, files=self.retention.files_of(Holder("group", group.group_id)))
            for group in change.groups
        ]
        record = RunRecord(
            phase=self.run.phase.value,
            reason=self.run.reason,
            stopped_in=None if self.run.stopped_in is None else self.run.stopped_in.value,
            leases_until_s=self.run.leases_until_s,
            drain_until_s=self.run.drain_until_s,
            policy_version=self.policy_version,
            policy_applied=self.policy_applied,
            policy_before=self.policy_before,
            next_step=self.next_step,
            next_lease_index=self.next_lease_index,
            next_ready_index=self.next_ready_index,
        )
        if record != self._sealed:
            change.run = self._sealed = record

    def lease_of_rollout(self, rollout_id: RolloutId) -> Lease | None:
        """The rollout's lease, open or ended."""
        return self.leases.get(self.lease_of.get(rollout_id, LeaseId("")))

    def is_stale(self, policy_version: int) -> bool:
        """Whether work of this version is too old for the next step to be built."""
        return is_stale(
            step=self.next_step,
            policy_version=policy_version,
            max_off_policy_steps=self.rules.max_off_policy_steps,
        )

    def end_lease(
        self, change: Change, lease: Lease, state: LeaseState, *, reason: str, now_s: float
    ) -> None:
        """An open lease ends without a delivery: its group goes on without it."""
        self.put_lease(change, structs.replace(lease, state=state, reason=reason))
        change.delete_files += self.retention.release(Holder("lease", lease.lease_id))
        self.discard_session(change, lease)
        result = self.groups.fail(lease.group_id, lease.rollout_id, now_s=now_s)
        if result is not None:
            self.settle_group(change, result)

    def settle_group(self, change: Change, result: GroupResult) -> None:
        """A group is complete: its waiting members get their advantages."""
        for rollout_id, advantage in result.advantages.items():
            rollout = self.held.get(rollout_id)
            if rollout is None or rollout.state is not RolloutState.WAITING:
                continue
            if advantage == 0.0 and self.rules.filter_zero_advantage:
                self.drop(change, rollout, DropReason.FILTERED, detail="all rewards are equal")
            else:
                self.make_ready(change, advantaged(rollout, advantage))
        change.delete_files += self.retention.release(Holder("group", result.group_id))

    def make_ready(self, change: Change, rollout: Rollout) -> None:
        """The rollout may go into the next step."""
        ready = structs.replace(
            rollout, state=RolloutState.READY, ready_index=self.next_ready_index
        )
        self.next_ready_index += 1
        self.put_rollout(change, ready)

    def drop(
        self, change: Change, rollout: Rollout, reason: DropReason, *, detail: str = ""
    ) -> Rollout:
        """A held rollout will not train: its files go at once."""
        dropped = structs.replace(
            rollout,
            state=RolloutState.DROPPED,
            reason=reason,
            detail=detail,
            samples=(),
            files=frozenset(),
        )
        self.put_rollout(change, dropped)
        change.delete_files += self.retention.release(Holder("rollout", rollout.rollout_id))
        return dropped

    def drop_stale(self, change: Change, *, now_s: float) -> None:
        """Drop held rollouts that are too old for the next step, cancel leases that will be.

        To be called whenever the next step moves on: what comes later is checked as it comes.
        """
        for rollout in [r for r in self.held.values() if self.is_stale(r.policy_version)]:
            self.drop(change, rollout, DropReason.STALE)
        for lease in [x for x in self.open_leases.values() if self.is_stale(x.policy_version)]:
            self.end_lease(change, lease, LeaseState.CANCELLED, reason="stale", now_s=now_s)

    def oldest_live(self) -> int | None:
        """The least policy version of open leases and held rollouts."""
        live: Iterable[Lease | Rollout] = (*self.open_leases.values(), *self.held.values())
        return min((item.policy_version for item in live), default=None)
