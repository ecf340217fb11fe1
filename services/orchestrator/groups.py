"""Groups of rollouts that share a prompt: who is a member, and when the group is complete. Pure.

A group is complete when all ``size`` members have ended. Failed, aborted, expired and cancelled
members leave it: the mean is over what was delivered. Until then a member that failed may be
replaced by another rollout. A member that never took a lease counts as failed when the group is
closed by its deadline.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from services.orchestrator.errors import GroupClosed, GroupConflict, GroupFull
from services.orchestrator.records import Change, GroupRecord, MemberRecord
from sideband.batch.advantages import group_advantages
from sideband.ids import GroupId, RolloutId


class _Member(msgspec.Struct, gc=False):
    index: int  # of dispatch
    is_open: bool = True
    reward: float | None = None  # None: none given, or it failed
    is_delivered: bool = False


@dataclass(slots=True)
class _Group:
    size: int
    touched_s: float
    members: dict[RolloutId, _Member] = field(default_factory=dict)
    open_count: int = 0  # of members

    @property
    def is_complete(self) -> bool:
        return len(self.members) == self.size and self.open_count == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """A closed group: the advantage of each rewarded member, in dispatch order."""

    group_id: GroupId
    advantages: dict[RolloutId, float]
    missing: int  # members that delivered nothing


class Groups:
    """Open groups. Closed ones are forgotten, but their ids stay closed."""

    def __init__(self, *, closed_max: int) -> None:
        self._groups: dict[GroupId, _Group] = {}
        self._idle: dict[GroupId, None] = {}  # open groups without an open member
        self._closed: dict[GroupId, None] = {}
        self._closed_max = closed_max
        # What changed since it was taken last; a group that closed takes its members along.
        self._touched: dict[GroupId, GroupRecord] = {}
        self._members_touched: dict[tuple[GroupId, RolloutId], None] = {}
        self._replaced: list[tuple[GroupId, RolloutId]] = []
        self._forgotten: list[GroupId] = []

    def __len__(self) -> int:
        return len(self._groups)

    def join(
        self, group_id: GroupId, *, size: int, rollout_id: RolloutId, index: int, now_s: float
    ) -> None:
        """A new member. Raises GroupClosed, GroupConflict (another size), GroupFull."""
        if group_id in self._closed:
            raise GroupClosed(group_id)
        group = self._groups.get(group_id) or _Group(size=size, touched_s=now_s)
        if group.size != size:
            raise GroupConflict(group_id, known=group.size, given=size)
        if len(group.members) == size:
            failed = [
                name
                for name, member in group.members.items()
                if not member.is_open and not member.is_delivered
            ]
            if not failed:
                raise GroupFull(group_id, size=size)
            del group.members[failed[0]]
            self._members_touched.pop((group_id, failed[0]), None)
            self._replaced.append((group_id, failed[0]))
        group.members[rollout_id] = _Member(index)
        group.open_count += 1
        group.touched_s = now_s
        self._groups[group_id] = group
        self._idle.pop(group_id, None)
        self._touch(group_id, rollout_id)

    def deliver(
        self, group_id: GroupId, rollout_id: RolloutId, *, reward: float | None, now_s: float
    ) -> GroupResult | None:
        """A member has delivered. The result when that completes the group."""
        return self._end(group_id, rollout_id, reward=reward, is_delivered=True, now_s=now_s)

    def fail(self, group_id: GroupId, rollout_id: RolloutId, *, now_s: float) -> GroupResult | None:
        """A member leaves without a reward. The result when that completes the group."""
        return self._end(group_id, rollout_id, reward=None, is_delivered=False, now_s=now_s)

    def _end(
        self,
        group_id: GroupId,
        rollout_id: RolloutId,
        *,
        reward: float | None,
        is_delivered: bool,
        now_s: float,
    ) -> GroupResult | None:
        group = self._groups.get(group_id)
        member = group.members.get(rollout_id) if group else None
        if group is None or member is None or not member.is_open:
            return None  # the group was closed, or the member replaced, before
        member.is_open, member.reward, member.is_delivered = False, reward, is_delivered
        group.open_count -= 1
        group.touched_s = now_s
        if group.open_count == 0:
            self._idle[group_id] = None
        self._touch(group_id, rollout_id)
        return self.close(group_id) if group.is_complete else None

    def withdraw(self, group_id: GroupId, rollout_id: RolloutId) -> None:
        """A delivered member leaves an open group, and its reward with it."""
        group = self._groups.get(group_id)
        member = group.members.get(rollout_id) if group else None
        if member is not None:
            member.reward, member.is_delivered = None, False
            self._members_touched[group_id, rollout_id] = None

    def overdue(self, *, now_s: float, timeout_s: float) -> list[GroupId]:
        """Groups that nobody works on and that nobody joined for ``timeout_s``."""
        return [
            group_id
            for group_id in self._idle
            if now_s - self._groups[group_id].touched_s >= timeout_s
        ]

    def close(self, group_id: GroupId) -> GroupResult:
        """Close the group over what was delivered; members still open count as failed."""
        group = self._groups.pop(group_id)
        self._idle.pop(group_id, None)
        self._closed[group_id] = None
        self._touched.pop(group_id, None)  # so that the order is that of the last change
        self._touched[group_id] = GroupRecord(
            group_id=group_id, size=group.size, touched_s=group.touched_s, is_closed=True
        )
        for name in group.members:
            self._members_touched.pop((group_id, name), None)
        while len(self._closed) > self._closed_max:
            oldest = next(iter(self._closed))
            del self._closed[oldest]
            self._touched.pop(oldest, None)
            self._forgotten.append(oldest)
        members = sorted(group.members.items(), key=lambda item: item[1].index)
        rewarded = [(name, member.reward) for name, member in members if member.reward is not None]
        rewards = [reward for _, reward in rewarded]
        values = group_advantages(rewards).tolist() if rewards else []
        delivered = sum(member.is_delivered for _, member in members)
        return GroupResult(
            group_id=group_id,
            advantages={name: value for (name, _), value in zip(rewarded, values, strict=True)},
            missing=group.size - delivered,
        )

    def _touch(self, group_id: GroupId, rollout_id: RolloutId) -> None:
        group = self._groups[group_id]
        self._members_touched[group_id, rollout_id] = None
        self._touched.pop(group_id, None)
        self._touched[group_id] = GroupRecord(
            group_id=group_id, size=group.size, touched_s=group.touched_s, is_closed=False
        )

    def take_changes(self, change: Change) -> None:
        """Move what changed since the last call into ``change``."""
        change.groups += self._touched.values()
        change.members += [
            self._member_record(group_id, name) for group_id, name in self._members_touched
        ]
        change.members_replaced += self._replaced
        change.groups_forgotten += self._forgotten
        self._touched, self._members_touched = {}, {}
        self._replaced, self._forgotten = [], []

    def _member_record(self, group_id: GroupId, rollout_id: RolloutId) -> MemberRecord:
        member = self._groups[group_id].members[rollout_id]
        return MemberRecord(
            group_id=group_id,
            rollout_id=rollout_id,
            index=member.index,
            is_open=member.is_open,
            is_delivered=member.is_delivered,
            reward=member.reward,
        )

    def restore(self, groups: Iterable[GroupRecord], members: Iterable[MemberRecord]) -> None:
        """Take over recorded groups, in the order of their last change. Only when empty."""
        assert not self._groups, "restored once, before anything else"
        assert not self._closed, "restored once, before anything else"
        for record in groups:
            if record.is_closed:
                self._closed[record.group_id] = None
            else:
                self._groups[record.group_id] = _Group(size=record.size, touched_s=record.touched_s)
        for member in sorted(members, key=lambda member: member.index):
            group = self._groups[member.group_id]
            group.members[member.rollout_id] = _Member(
                member.index,
                is_open=member.is_open,
                reward=member.reward,
                is_delivered=member.is_delivered,
            )
            group.open_count += member.is_open
        idle = (name for name, group in self._groups.items() if group.open_count == 0)
        self._idle = dict.fromkeys(idle)

    def wait_longer(self, by_s: float) -> None:
        """Nobody could work on the open groups for ``by_s``."""
        busy = [group_id for group_id in self._groups if group_id not in self._idle]
        for group_id in (*busy, *self._idle):
            group = self._groups[group_id]
            group.touched_s += by_s
            record = GroupRecord(
                group_id=group_id, size=group.size, touched_s=group.touched_s, is_closed=False
            )
            self._touched.pop(group_id, None)
            self._touched[group_id] = record
