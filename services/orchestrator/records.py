"""What the orchestrator knows: leases, rollouts, steps, and what changes of them. Pure data.

A change is what one decision did. The service makes it durable in the ledger, and only then acts
on it: answers, deletes, ships.

There are hundreds of thousands of leases and rollouts, none in a cycle: the garbage collector does
not look at them (``gc=False``), else each of its walks would hold the event loop.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec

from services.orchestrator.history import PolicyRecord, ReturnRecord, StartRecord
from sideband.batch.types import Sample
from sideband.ids import GroupId, LeaseId, RolloutId, SessionId


class LeaseState(StrEnum):
    """Open, or how it ended."""

    OPEN = "open"
    DELIVERED = "delivered"
    ABORTED = "aborted"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class RolloutState(StrEnum):
    """Waits for its group, is ready for a step, lies in one, was trained on, or was dropped."""

    WAITING = "waiting"
    READY = "ready"
    PACKED = "packed"
    TRAINED = "trained"
    DROPPED = "dropped"


class DropReason(StrEnum):
    """Why a rollout, or what is left of it, will never train."""

    FAILED = "failed"
    ABORTED = "aborted"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    STALE = "stale"
    REFUSED = "refused"
    FILES_GONE = "files_gone"
    NO_TRAINABLE_TOKENS = "no_trainable_tokens"
    FILTERED = "filtered"
    REMOVED = "removed"
    NO_LEASE = "no_lease"
    RUN_ENDED = "run_ended"


class StepState(StrEnum):
    """Built, taken by the feed, committed by every rank, or closed: its policy is applied."""

    BUILT = "built"
    SHIPPED = "shipped"
    ACKNOWLEDGED = "acknowledged"
    CLOSED = "closed"


HELD_STATES: Final = frozenset({RolloutState.WAITING, RolloutState.READY})


class Lease(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Permission to run one rollout with policy version k. ``index`` counts dispatches from 0."""

    lease_id: LeaseId
    rollout_id: RolloutId
    group_id: GroupId
    group_size: int
    env_name: str
    session_id: SessionId | None
    policy_version: int
    index: int
    taken_s: float
    deadline_s: float
    files: frozenset[str] = frozenset()  # that the client named while it ran
    state: LeaseState = LeaseState.OPEN
    reason: str = ""


class Tally(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What was counted while the samples of one rollout (or one step) were made."""

    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    routing_positions: int = 0  # that must have a row
    routing_rows: int = 0  # that have one
    mask_positions: int = 0  # trained tokens whose sampling cut the vocabulary
    mask_rows: int = 0  # of these, with a kept set
    samples_with_holes: int = 0
    samples_truncated: int = 0
    samples_untrainable: int = 0
    rows_invalid: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            **{name: getattr(self, name) + getattr(other, name) for name in Tally.__struct_fields__}
        )

    @property
    def routing_valid_fraction(self) -> float:
        """Positions with a routing row among those that must have one; 1 when none must."""
        return self.routing_rows / self.routing_positions if self.routing_positions else 1.0

    @property
    def mask_valid_fraction(self) -> float:
        """Trained tokens with a kept set among those that must have one; 1 when none must."""
        return self.mask_rows / self.mask_positions if self.mask_positions else 1.0


class Rollout(msgspec.Struct, frozen=True, kw_only=True, gc=False, eq=False):
    """One delivered rollout. ``samples`` are held until its step is built, then let go."""

    rollout_id: RolloutId
    group_id: GroupId
    policy_version: int
    index: int
    digest: str
    state: RolloutState
    reward: float | None = None
    advantage: float | None = None  # the group's, put on its samples when the group was complete
    samples: tuple[Sample, ...] = ()
    files: frozenset[str] = frozenset()
    files_shared: frozenset[str] = frozenset()  # held by the group for the request's other choices
    tally: Tally = msgspec.field(default_factory=Tally)
    reason: DropReason | None = None
    detail: str = ""
    refusal: str | None = None  # the problem code of a body that was refused
    step: int | None = None
    ready_index: int | None = None  # counts rollouts that became ready, in order of arrival


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecord:
    """One built step. ``body`` is what the feed gets; it is held until every rank committed.

    It is empty after a resume until the step is built again: ``digest`` says that it is the same.
    """

    step: int
    state: StepState
    rollout_ids: tuple[RolloutId, ...]
    files: frozenset[str]
    digest: str
    body: bytes
    size_bytes: int
    micro_batches: int
    tally: Tally
    built_s: float
    acknowledged_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A step that is decided and not yet built. Its rollouts still have their samples."""

    step: int
    rollouts: tuple[Rollout, ...]

    @property
    def files(self) -> frozenset[str]:
        """Every file that its ranks may have to read."""
        return frozenset(file for rollout in self.rollouts for file in rollout.files)

    @property
    def tally(self) -> Tally:
        """The sum over its rollouts."""
        return sum((rollout.tally for rollout in self.rollouts), Tally())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """One member of an open group. ``reward`` is None when none was given, or it failed."""

    group_id: GroupId
    rollout_id: RolloutId
    index: int  # of dispatch
    is_open: bool
    is_delivered: bool
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One group. A closed one has no members any more; its id stays closed.

    ``files`` are what it keeps for choices of its members' requests that may still come.
    """

    group_id: GroupId
    size: int
    touched_s: float
    is_closed: bool
    files: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run is at, beside its leases, rollouts, groups, steps and files."""

    phase: str
    reason: str
    stopped_in: str | None
    leases_until_s: float | None
    drain_until_s: float | None
    policy_version: int | None
    policy_applied: int
    policy_before: int | None
    next_step: int
    next_lease_index: int
    next_ready_index: int


@dataclass(slots=True, kw_only=True, eq=False)
class Change:
    """What one decision changed, and what must be done once that is durable.

    A record replaces an earlier one of the same id, in the order given. ``Book.seal`` adds what
    decisions do not name themselves: groups, counters, what is forgotten.
    """

    leases: list[Lease] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    bodies: dict[RolloutId, tuple[Sample, ...]] = field(default_factory=dict)  # now collected
    policy_version: int | None = None
    phase: str | None = None
    start: StartRecord | None = None
    policies: list[PolicyRecord] = field(default_factory=list)
    returns: list[ReturnRecord] = field(default_factory=list)
    delete_files: list[str] = field(default_factory=list)  # given up: to be deleted, never held
    discard_sessions: list[SessionId] = field(default_factory=list)

    run: RunRecord | None = None
    groups: list[GroupRecord] = field(default_factory=list)
    members: list[MemberRecord] = field(default_factory=list)
    members_replaced: list[tuple[GroupId, RolloutId]] = field(default_factory=list)
    groups_forgotten: list[GroupId] = field(default_factory=list)
    leases_forgotten: list[LeaseId] = field(default_factory=list)
    rollouts_forgotten: list[RolloutId] = field(default_factory=list)
    steps_forgotten: list[int] = field(default_factory=list)
    policies_forgotten: list[int] = field(default_factory=list)
    returns_forgotten: list[int] = field(default_factory=list)
    versions_forgotten: list[int] = field(default_factory=list)  # their folders are gone
    files_deleted: list[str] = field(default_factory=list)  # given up before, and now deleted

    def __bool__(self) -> bool:
        return any(bool(getattr(self, name)) for name in Change.__slots__ if name != "run") or (
            self.run is not None or self.policy_version is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records:
    """Everything a ledger has of one run; each list in the order of the records' last change.

    ``rollouts`` have their samples as delivered while they are held or lie in a step that is not
    built; ``files`` are given up, and True when they may not be deleted yet.
    """

    run: RunRecord
    leases: list[Lease]
    rollouts: list[Rollout]
    groups: list[GroupRecord]
    members: list[MemberRecord]
    steps: list[StepRecord]
    files: dict[str, bool]
    start: StartRecord | None  # None: an earlier version began it
    policies: list[PolicyRecord]
    returns: list[ReturnRecord]
    saved_s: float  # when the last of it was made durable, Unix time
    latest_start: str | None = None  # of all ids that processes were started with, the newest

    def is_older_start(self, start_id: str) -> bool:
        """Whether a process with another id was started since ``start_id`` was first seen."""
        return self.latest_start not in {None, start_id}
