"""The whole book under random histories: leases, groups, deliveries, steps, commits, policies.

A plain model knows which files are needed by whom; after each action the "disk" holds exactly
them. At the end of every history a drain must end the run and leave nothing.
"""

import contextlib
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.kit.problems import Problem
from services.orchestrator import collecting, ending, going_back, leasing, policies, stepping
from services.orchestrator.book import Book
from services.orchestrator.collecting import Delivery
from services.orchestrator.history import ReturnRecord
from services.orchestrator.leasing import LeaseRequest
from services.orchestrator.lifecycle import Phase
from services.orchestrator.membership import StepSize
from services.orchestrator.records import Change, DropReason, Lease, RolloutState, StepState, Tally
from services.orchestrator.remaining import files_of
from services.orchestrator.rules import Rules
from sideband.batch.types import Sample
from sideband.ids import GroupId, LeaseId, RolloutId, RunId, SessionId
from sideband.segments import PayloadSegment
from sideband.testing.batches import make_sample

RULES = Rules(
    run_id=RunId("run"),
    step_size=StepSize(rollouts=2),
    max_off_policy_steps=2,
    is_deterministic=False,
    filter_zero_advantage=False,
    ship_last_partial_step=True,
    first_step=1,
    lease_timeout_s=50,
    group_timeout_s=30,
    policy_timeout_s=100_000,
    leases_open_max=12,
    rollouts_held_max=50,
    steps_ahead_max=2,
    history_max=1000,
)
SAMPLE = make_sample(1, tokens=4)


def file_of(name: str, version: int) -> str:
    return f"v{version}/run/00/{name}-0123456789abcdef.sbp"


class History(RuleBasedStateMachine):
    """Drives the pure decisions as the service does, with a disk that is a set."""

    book_rules = RULES

    @initialize(
        is_deterministic=st.booleans(),
        is_filtering=st.booleans(),
        steps_kept=st.sampled_from([0, 0, 1, 2]),
        max_off_policy_steps=st.sampled_from([0, 2]),
    )
    def start(
        self,
        is_deterministic: bool,
        is_filtering: bool,
        steps_kept: int,
        max_off_policy_steps: int,
    ) -> None:
        self.book = Book(
            replace(
                self.book_rules,
                is_deterministic=is_deterministic,
                filter_zero_advantage=is_filtering,
                steps_kept=steps_kept,
                max_off_policy_steps=max_off_policy_steps,
            )
        )
        self.now_s = 0.0
        self.bodies: dict[RolloutId, tuple[Sample, ...]] = {}  # as delivered
        self.disk: set[str] = set()
        self.deleted: set[str] = set()  # given up, so to be deleted once
        self.left: set[str] = set()  # garbage that may still lie there
        self.written: dict[SessionId, set[str]] = {}  # by session
        self.count = 0
        self.to_rank: dict[int, frozenset[str]] = {}  # built, not committed: files a rank reads
        self.to_apply: dict[int, frozenset[str]] = {}  # built, v(step) not applied
        self.indices: dict[RolloutId, int] = {}  # of dispatch
        self.order: list[int] = []  # dispatch indices in the order in which they were packed
        self.act(lambda change: stepping.apply_policy(self.book, change, 0))

    def act(self, decide: Any) -> Any:
        change = Change()
        outcome = decide(change)
        self.bodies |= change.bodies
        self.decided(change)
        assert len(set(change.delete_files)) == len(change.delete_files), "deleted once"
        for file in change.delete_files:
            assert all(file not in files for files in self.to_rank.values()), "a rank reads it"
            assert all(file not in files for files in self.to_apply.values()), "not applied yet"
            self.deleted.add(file)
            self.delete(file)
        for session_id in change.discard_sessions:  # the proxy deletes all that it wrote
            sharing = [x for x in self.book.open_leases.values() if x.session_id == session_id]
            assert not sharing, "who shares it still writes"
            assert not self.written.get(session_id, set()) & self.needed(), "others need it"
        return outcome

    def delete(self, file: str) -> None:
        """What the executor does with a file that was given up."""
        self.disk.discard(file)

    def decided(self, change: Change) -> None:
        """What was decided, before anything follows from it."""
        self.book.seal(change)

    @rule(group=st.integers(0, 2), size=st.integers(1, 3))
    def lease(self, group: int, size: int) -> None:
        self.take(group, size)

    def take(self, group: int, size: int) -> LeaseId | None:
        self.count += 1
        asked = LeaseRequest(
            rollout_id=RolloutId(f"r{self.count}"),
            group_id=GroupId(f"g{group}.{size}.{self.count // 8}"),
            group_size=size,
            env_name="",
            session_id=self.session(group, size),
        )
        lease_id = LeaseId(f"l{self.count}")
        with contextlib.suppress(Problem):  # full, closed, or the policy is behind
            self.act(lambda c: leasing.take(self.book, c, asked, lease_id, self.now_s))
        return lease_id if lease_id in self.book.open_leases else None

    def session(self, group: int, size: int) -> SessionId | None:
        """Choices of one request share a session; others have one of their own, or none."""
        shared = SessionId(f"s{group}.{size}.{self.count // 8}")
        return [None, SessionId(f"s{self.count}"), shared, shared][self.count % 4]

    @rule(sizes=st.lists(st.integers(1, 2), min_size=1, max_size=4), data=st.data())
    def whole_rollouts(self, sizes: list[int], data: st.DataObject) -> None:
        """Some rollouts run without an incident, so that histories get somewhere."""
        leases = [self.take(100 + self.count, size) for size in sizes]
        for lease_id in data.draw(st.permutations([name for name in leases if name])):
            reward = data.draw(st.sampled_from([0.0, 1.0]))
            self.hand_in(self.book.leases[lease_id], reward, "good", is_own=reward > 0)

    def write(self, lease: Lease, files: set[str]) -> None:
        """What an engine does: each file once."""
        self.disk |= files - self.deleted
        if lease.session_id is not None:
            self.written.setdefault(lease.session_id, set()).update(files)

    def some_lease(self, data: st.DataObject) -> Any:
        return data.draw(st.sampled_from(sorted(self.book.open_leases.values(), key=id_of)))

    @precondition(lambda self: self.book.open_leases)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease = self.some_lease(data)
        file = file_of(f"{lease.rollout_id}.early", lease.policy_version)
        self.write(lease, {file})
        self.act(lambda c: leasing.renew(self.book, c, lease.lease_id, [file], self.now_s))

    @precondition(lambda self: self.book.open_leases)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        lease = self.some_lease(data)
        self.act(lambda c: leasing.abort(self.book, c, lease.lease_id, self.now_s))

    @precondition(lambda self: self.book.open_leases)
    @rule(
        data=st.data(),
        reward=st.sampled_from([0.0, 1.0]),
        kind=st.sampled_from(["good", "shared", "refused", "failed", "empty"]),
        is_own=st.booleans(),
    )
    def deliver(self, data: st.DataObject, reward: float, kind: str, is_own: bool) -> None:
        self.hand_in(self.some_lease(data), reward, kind, is_own=is_own)

    @precondition(lambda self: self.book.leases)
    @rule(data=st.data(), kind=st.sampled_from(["good", "shared", "failed"]))
    def deliver_again_or_late(self, data: st.DataObject, kind: str) -> None:
        """Any lease: late deliveries are dropped, repeats change nothing, others are refused."""
        leases = sorted(self.book.leases.values(), key=id_of)
        self.hand_in(data.draw(st.sampled_from(leases)), 1.0, kind, is_own=True)

    def hand_in(self, lease: Lease, reward: float, kind: str, *, is_own: bool) -> None:
        own = file_of(lease.rollout_id, lease.policy_version)
        shared = file_of(f"{lease.group_id}.shared", lease.policy_version)
        early = file_of(f"{lease.rollout_id}.early", lease.policy_version)
        files = {own} | ({early} if early in lease.files else set())
        if kind == "shared":
            files.add(shared)
        self.write(lease, files)
        trained = files if kind in {"good", "shared"} else set()
        drop = {"refused": DropReason.REFUSED, "failed": DropReason.FAILED}.get(kind)
        delivery = Delivery(
            rollout_id=lease.rollout_id,
            digest=kind,
            reward=reward,
            is_waiting=not is_own,
            samples=(sample_of(lease.rollout_id, trained),) if trained else (),
            tally=Tally(samples=1, tokens=4),
            files=frozenset(files),
            files_trained=frozenset(trained),
            files_shared=frozenset({shared} if kind == "shared" else ()),
            drop=drop,
        )
        self.act(lambda c: collecting.deliver(self.book, c, delivery, self.now_s))

    @precondition(lambda self: self.book.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.book.held)))
        self.act(lambda c: collecting.remove(self.book, c, name))

    @rule()
    def build(self) -> None:
        draft = self.act(lambda c: stepping.begin(self.book, c, self.now_s))
        if draft is None:
            return
        for rollout in draft.rollouts:
            assert (draft.step - 1) - rollout.policy_version <= self.book.rules.max_off_policy_steps
            self.order.append(rollout.index)
            self.indices[rollout.rollout_id] = rollout.index
        self.to_rank[draft.step] = self.to_apply[draft.step] = draft.files
        assert draft.files <= self.disk
        built = stepping.Built(body=b"body", digest="d", micro_batches=1)
        self.act(lambda c: stepping.finish(self.book, c, draft, built, self.now_s))
        self.act(lambda c: stepping.shipped(self.book, c, draft.step))

    @precondition(lambda self: self.to_rank)
    @rule()
    def commit(self) -> None:
        step = min(self.to_rank)
        del self.to_rank[step]
        self.act(lambda c: stepping.acknowledge(self.book, c, step, self.now_s))

    @rule(behind=st.integers(-1, 2))
    def apply(self, behind: int) -> None:
        """Engines apply what is committed; one that was started anew may be behind for a while,
        and an acknowledgement may be known later than the policy.
        """
        committed = min(self.to_rank, default=self.book.next_step) - 1
        version = max(0, min(committed - behind, self.book.next_step - 1))
        if self.book.policy_before is None or version < self.book.policy_before:
            self.to_apply = {s: files for s, files in self.to_apply.items() if s > version}
        self.act(lambda c: policies.report(self.book, c, version, source="poll", now_s=self.now_s))

    @rule(data=st.data(), is_far=st.booleans(), loses=st.sampled_from([0, 0, 1, 3]))
    def go_back(self, data: st.DataObject, is_far: bool, loses: int) -> None:
        """The trainer restarts from an earlier checkpoint; the disk may have lost some files."""
        first, last = self.book.rules.first_step - 1, going_back.committed_step(self.book)
        step = first if is_far else data.draw(st.integers(first, last))
        steps = going_back.steps_after(self.book, step)
        files = {n: files_of(self.bodies[n]) for names in steps.values() for n in names}
        at_risk = sorted(frozenset[str]().union(*files.values()))
        lost = set(data.draw(st.permutations(at_risk))[:loses])
        self.disk -= lost
        whole = {
            number: tuple(n for n in names if not files[n] & lost)
            for number, names in steps.items()
        }
        remains = going_back.Remains(
            steps=steps,
            files=files,
            files_missing=frozenset(lost),
            samples={name: self.bodies[name] for names in steps.values() for name in names},
        )
        gap = next(n for n in range(step + 1, self.book.next_step + 1) if not whole.get(n))

        def decide(change: Change) -> ReturnRecord:
            record = going_back.go_back(
                self.book, change, step=step, remains=remains, now_s=self.now_s
            )
            kept = {n: frozenset[str]().union(*(files[r] for r in whole[n])) for n in again(gap)}
            before = {n: files for n, files in self.to_apply.items() if n <= step}
            self.to_rank, self.to_apply = dict(kept), {**before, **kept}
            return record

        def again(gap: int) -> list[int]:
            return [number for number in steps if number < gap]

        record = self.act(decide)
        assert sorted([*record.steps_again, *record.steps_reduced]) == again(gap)
        assert all(self.book.steps[n].rollout_ids == whole[n] for n in again(gap))
        moved = {n for number in record.steps_moved for n in whole[number]}
        assert moved == {n for number, names in whole.items() if number >= gap for n in names}
        assert all(self.book.held[name].state is RolloutState.READY for name in moved)
        dropped = {n for names in steps.values() for n in names} - moved
        dropped -= {n for number in again(gap) for n in whole[number]}
        assert dropped <= set(record.rollouts_dropped), "all that is dropped is listed"
        assert self.book.next_step == (
            gap if gap in range(step + 1, record.last_step + 1) else record.last_step + 1
        )
        unpacked = [name for number, names in steps.items() if number >= gap for name in names]
        indices = {self.indices[name] for name in unpacked}
        self.order = [index for index in self.order if index not in indices]

    @rule(passed_s=st.sampled_from([1.0, 20.0, 40.0]))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.act(lambda c: ending.tick(self.book, c, self.now_s))

    @invariant()
    def the_disk_holds_what_is_needed_and_nothing_that_was_discarded(self) -> None:
        if not hasattr(self, "book"):
            return
        needed = self.needed()
        assert needed <= self.disk
        spare = {file for file in self.disk - needed if not file.endswith("shared")}
        for file in sorted(spare - self.left):
            # Left over may only be what a group keeps for its other members.
            assert self.book.retention.why(file), f"{file} is needed by nobody"

    def needed(self) -> set[str]:
        """What open leases, held rollouts and steps that are not closed refer to."""
        book = self.book
        needed = {file for rollout in book.held.values() for file in rollout.files}
        needed |= {file for lease in book.open_leases.values() for file in lease.files}
        return needed | {
            file
            for record in book.steps.values()
            if record.state is not StepState.CLOSED
            for file in record.files
        }

    @invariant()
    def what_is_held_is_fresh_enough(self) -> None:
        if hasattr(self, "book"):
            versions = {rollout.policy_version for rollout in self.book.held.values()}
            versions |= {lease.policy_version for lease in self.book.open_leases.values()}
            assert not any(self.book.is_stale(version) for version in versions)

    def teardown(self) -> None:
        if hasattr(self, "book"):
            self.drain()
            assert not self.disk, "a drained run leaves no file"

    def drain(self) -> None:
        """Whatever was done, a drain ends the run."""
        run = self.book.run.draining(leases_until_s=self.now_s, drain_until_s=self.now_s + 1e6)
        self.act(lambda c: ending.set_run(self.book, c, run, self.now_s))
        if self.book.policy_before is not None:  # the engines get the weights of the checkpoint
            step, lineage = self.book.returns[-1].step, self.book.lineage
            self.act(lambda c: stepping.apply_policy(self.book, c, step, lineage=lineage))
        for _ in range(60):
            self.wait(1.0)
            self.build()
            while self.to_rank:
                self.commit()
            self.apply(0)
            if self.book.run.is_terminal:
                break
        hypothesis.event(f"steps: {min(self.book.next_step - 1, 5)}")
        hypothesis.event(f"leases: {min(self.count, 10)}")
        assert (self.book.run.phase, self.book.run.reason) == (Phase.ENDED, "drained")
        states = {rollout.state for rollout in self.book.rollouts.values()}
        assert states <= {RolloutState.TRAINED, RolloutState.DROPPED}
        if self.book.rules.is_deterministic:
            assert self.order == sorted(self.order), "steps follow dispatch order"


def id_of(item: Any) -> str:
    return str(item.lease_id)


def sample_of(rollout_id: RolloutId, files: set[str]) -> Sample:
    """A sample that refers to ``files``."""
    segments = tuple(
        PayloadSegment(
            field="routed_experts",
            file=file,
            offset=64,
            row=0,
            pos=position,
            rows=1,
            dtype="uint8",
            shape=(1, 1),
        )
        for position, file in enumerate(sorted(files))
    )
    return replace(SAMPLE, rollout_id=rollout_id, segments=segments, form="handle")


TestBook = pytest.mark.timeout(300)(History.TestCase)  # long histories, busy machines
TestBook.settings = settings(stateful_step_count=80)
