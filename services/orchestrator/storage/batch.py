"""Many changes as one set of rows to write and to delete. Pure.

Of several changes of one record the last one counts. Deletions are carried out before writes, so a
row that is deleted here and written later in the same batch stays.
"""

from collections.abc import Hashable, Iterable
from itertools import count

from sqlalchemy import Table

from services.orchestrator.records import Change, Rollout, RolloutState, StepState
from services.orchestrator.retention import version_of
from services.orchestrator.storage import rows, tables
from services.orchestrator.storage.rows import Row
from sideband.batch.types import Sample
from sideband.ids import RolloutId

# A key is a value of each key column but the run's; None deletes.
Writes = dict[tuple[Hashable, ...], Row | None]


class Batch:
    """What one commit writes. ``serials`` number the changes of records over the whole run."""

    def __init__(self, changes: Iterable[Change], serials: "count[int]") -> None:
        self.writes: dict[Table, Writes] = {table: {} for table in tables.OF_RUN}
        self.bodies: dict[RolloutId, tuple[Sample, ...]] = {}
        self.bodies_dropped: dict[RolloutId, None] = {}
        self.groups_closed: dict[str, None] = {}  # their members go
        self.versions_forgotten: dict[int, None] = {}  # their files go
        self.files_deleted: dict[str, None] = {}  # given up in an earlier batch
        self._serials = serials
        for change in changes:
            self._take(change)

    def _put(self, table: Table, row: Row | None, *key: Hashable) -> None:
        writes = self.writes[table]
        writes.pop(key, None)
        writes[key] = row

    def _take(self, change: Change) -> None:
        serials = self._serials
        if change.start is not None:
            self._put(tables.STARTS, rows.start_row(change.start))
        if change.run is not None:
            self._put(tables.RUNS, rows.run_row(change.run))
        for lease in change.leases:
            self._put(tables.LEASES, rows.lease_row(lease, next(serials)), lease.lease_id)
        for lease_id in change.leases_forgotten:
            self._put(tables.LEASES, None, lease_id)
        self.bodies.update(change.bodies)
        for rollout in change.rollouts:
            self._rollout(rollout)
        for rollout_id in change.rollouts_forgotten:
            self._put(tables.ROLLOUTS, None, rollout_id)
        self._groups(change)
        for step in change.steps:
            self._put(tables.STEPS, rows.step_row(step, next(serials)), step.step)
            if step.state is StepState.CLOSED:
                for rollout_id in step.rollout_ids:
                    self._drop_body(rollout_id)
        for number in change.steps_forgotten:
            self._put(tables.STEPS, None, number)
        for policy in change.policies:
            self._put(tables.POLICIES, rows.policy_row(policy), policy.number)
        for number in change.policies_forgotten:
            self._put(tables.POLICIES, None, number)
        for record in change.returns:
            self._put(tables.RETURNS, rows.return_row(record), record.lineage)
        for lineage in change.returns_forgotten:
            self._put(tables.RETURNS, None, lineage)
        self._files(change)

    def _rollout(self, rollout: Rollout) -> None:
        row = rows.rollout_row(rollout, next(self._serials))
        self._put(tables.ROLLOUTS, row, rollout.rollout_id)
        if rollout.state is RolloutState.DROPPED:
            self._drop_body(rollout.rollout_id)

    def _drop_body(self, rollout_id: RolloutId) -> None:
        self.bodies.pop(rollout_id, None)
        self.bodies_dropped[rollout_id] = None

    def _groups(self, change: Change) -> None:
        members = self.writes[tables.MEMBERS]
        for group_id, rollout_id in change.members_replaced:
            self._put(tables.MEMBERS, None, group_id, rollout_id)
        for member in change.members:
            row = rows.member_row(member)
            self._put(tables.MEMBERS, row, member.group_id, member.rollout_id)
        for group in change.groups:
            row = rows.group_row(group, next(self._serials))
            self._put(tables.GROUPS, row, group.group_id)
            if group.is_closed:
                self.groups_closed[group.group_id] = None
                for key in [key for key in members if key[0] == group.group_id]:
                    del members[key]
        for group_id in change.groups_forgotten:
            self.groups_closed[group_id] = None  # perhaps in this very change
            self._put(tables.GROUPS, None, group_id)

    def _files(self, change: Change) -> None:
        files: Writes = self.writes[tables.FILES]
        for file in change.delete_files:
            facts = {"file": file, "policy_version": version_of(file), "is_pending": True}
            self._put(tables.FILES, facts, file)
        for file in change.files_deleted:
            row = files.get((file,))
            if row is None:  # only a row that is still there: its version may be forgotten
                self.files_deleted[file] = None
            else:
                row["is_pending"] = False
        for version in change.versions_forgotten:
            self.versions_forgotten[version] = None
            for key in [key for key in files if version_of(str(key[0])) == version]:
                del files[key]
