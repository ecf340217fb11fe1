"""The promise about files, after every action: none that is needed goes, every other one goes in
the end. All five rules of retention, an executor that fails and dies, and a ledger.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from services.orchestrator.losses import Report, drop_missing
from services.orchestrator.records import Change, RolloutState
from services.orchestrator.restoring import restore
from services.orchestrator.retention import version_of
from services.orchestrator.sweep import orphaned_versions, plan_version
from services.orchestrator.sweeping import sweep_rules
from tests.services.orchestrator.test_book import file_of
from tests.services.orchestrator.test_restoring import DurableHistory


class Promise(DurableHistory):
    """A history in which deletions take time, engines leave strays, and disks lose files.

    That what is needed stays is checked after every action by the invariant of ``History``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue: set[str] = set()  # of the executor: lost with the process

    def delete(self, file: str) -> None:
        self.queue.add(file)
        self.left.add(file)

    @precondition(lambda self: self.queue)
    @rule(data=st.data(), works=st.booleans())
    def execute(self, data: st.DataObject, works: bool) -> None:
        """One deletion is tried: it works, or the filesystem says no."""
        file = data.draw(st.sampled_from(sorted(self.queue)))
        if works:
            self.unlink(file)
            self.queue.discard(file)
            self.act(lambda change: change.files_deleted.append(file))

    def unlink(self, file: str) -> None:
        needed = {f for rollout in self.book.held.values() for f in rollout.files}
        needed |= {f for lease in self.book.open_leases.values() for f in lease.files}
        for files in (*self.to_rank.values(), *self.to_apply.values()):
            needed |= files
        assert file not in needed, "a file that is needed is never deleted"
        self.disk.discard(file)
        self.left.discard(file)

    @rule(data=st.data(), name=st.sampled_from(["x", "y", "z"]))
    def stray(self, data: st.DataObject, name: str) -> None:
        """A losing attempt that nobody names; of a version that leases may still be of."""
        newest = self.book.policy_version or 0
        version = data.draw(st.integers(max(0, newest - 2), newest))
        file = file_of(f"stray-{name}-{self.count}", version)
        self.disk.add(file)
        self.left.add(file)

    @rule(dies_half_way=st.booleans())
    def sweep(self, dies_half_way: bool) -> None:
        """Rule 3; a process may die between the files and the record of it."""
        versions = {version_of(file) for file in self.disk}
        for version in orphaned_versions(versions, sweep_rules(self.book)):
            files = [(file, 1) for file in sorted(self.disk) if version_of(file) == version]
            plan = plan_version(version, files, self.book.retention.is_held)
            for file in plan.files:
                self.unlink(file)
            self.queue -= set(plan.files)  # to try again would find nothing
            if plan.is_whole and not dies_half_way:
                self.book.retention.forget(version)
                self.act(lambda change, v=version: change.versions_forgotten.append(v))

    def crash(self) -> None:
        """The executor's memory is lost too; the ledger knows what was not done."""
        records = self.ledger.records()
        assert records is not None
        queue = {file for file, is_pending in records.files.items() if is_pending}
        assert self.queue <= queue, "no deletion is lost"
        self.book, change = restore(records, self.book.rules)
        assert not change
        self.queue = queue

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """Rule 5: somebody else's rm, then a restart. Only what can be dropped is tried here."""
        held = {f for r in self.book.held.values() for f in r.files}
        for files in (*self.to_rank.values(), *self.to_apply.values()):
            held -= files
        gone = data.draw(st.sets(st.sampled_from(sorted(held)), max_size=2)) if held else set()
        for file in gone:
            self.disk.discard(file)
        self.crash()
        report = Report(files_missing=sorted(gone))
        named = {r.rollout_id for r in self.book.held.values() if r.files & gone}
        self.act(lambda change: drop_missing(self.book, change, report))
        assert set(report.rollouts_dropped) == named, "all that is dropped is listed"
        for name in named:
            assert self.book.rollouts[name].state is RolloutState.DROPPED

    def decided(self, change: Change) -> None:
        super().decided(change)
        for version in change.versions_forgotten:
            self.deleted -= {file for file in self.deleted if version_of(file) == version}

    def teardown(self) -> None:
        """A drain ends the run; then the executor works again, and a sweep finds the strays."""
        if not hasattr(self, "book"):
            return
        self.drain()
        for file in sorted(self.queue):
            self.unlink(file)
        self.sweep(dies_half_way=False)
        assert not self.disk, "an ended run leaves no file"


TestPromise = pytest.mark.timeout(300)(Promise.TestCase)  # long histories, busy machines
TestPromise.settings = settings(stateful_step_count=40)
