"""Seeded histories of a book: every kind of decision, with samples of both forms."""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from services.kit.problems import Problem
from services.orchestrator import collecting, ending, going_back, leasing, policies, stepping
from services.orchestrator.book import Book
from services.orchestrator.collecting import Delivery
from services.orchestrator.going_back import Remains
from services.orchestrator.history import PolicySource
from services.orchestrator.leasing import LeaseRequest
from services.orchestrator.records import Change, DropReason, Lease, Tally
from services.orchestrator.remaining import files_of
from services.orchestrator.rules import Rules
from sideband.batch.types import Sample
from sideband.ids import GroupId, LeaseId, RolloutId, SessionId
from sideband.testing.batches import make_sample
from tests.services.orchestrator.test_book import RULES, file_of, sample_of

HARD_TEXTS = ("", "math", "a\x00b", "naïve ✓ \U0001f600", 'quote " \\ and \n line')


class SeededHistory:
    """One book and a stream of sealed changes."""

    def __init__(self, seed: int, rules: Rules = RULES, *, returns: int = 0) -> None:
        self.returns = returns  # how likely the trainer goes back
        self.bodies: dict[RolloutId, tuple[Sample, ...]] = {}
        self.random = random.Random(seed)
        self.book = Book(rules)
        self.now_s = 1000.0
        self.count = 0
        self.shipped: list[int] = []
        self.built = 0

    def changes(self, count: int) -> Iterator[Change]:
        """``count`` decisions, each as the change that it made."""
        yield self.report(0)
        acts = [self.lease] * 4 + [self.deliver] * 6 + [self.build] * 3 + [self.commit] * 2
        acts += [self.apply, self.apply, self.wait, self.renew, self.abort, self.remove]
        acts += [self.go_back] * self.returns
        for _ in range(count):
            yield from self.random.choice(acts)()

    def _decide(self, decide: Callable[[Change], Any]) -> Change:
        change = Change()
        with contextlib.suppress(Problem):
            decide(change)
        self.bodies |= change.bodies
        self.book.seal(change)
        return change

    def lease(self) -> Iterator[Change]:
        """A lease, often in a group, some with a session."""
        self.count += 1
        size = self.random.choice([1, 1, 2, 3])
        asked = LeaseRequest(
            rollout_id=RolloutId(f"r{self.count}"),
            group_id=GroupId(f"g{size}.{self.count // 4}" if size > 1 else f"g{self.count}"),
            group_size=size,
            env_name=self.random.choice(HARD_TEXTS),
            session_id=SessionId(f"s{self.count}") if self.count % 3 else None,
        )
        name = LeaseId(f"l{self.count}")
        yield self._decide(lambda c: leasing.take(self.book, c, asked, name, self.now_s))

    def _open(self) -> Lease | None:
        leases = list(self.book.open_leases.values())
        return self.random.choice(leases) if leases else None

    def renew(self) -> Iterator[Change]:
        """A lease names a file early."""
        lease = self._open()
        if lease is not None:
            files = [file_of(f"{lease.rollout_id}.early", lease.policy_version)]
            name = lease.lease_id
            yield self._decide(lambda c: leasing.renew(self.book, c, name, files, self.now_s))

    def abort(self) -> Iterator[Change]:
        """A lease is given up."""
        lease = self._open()
        if lease is not None:
            name = lease.lease_id
            yield self._decide(lambda c: leasing.abort(self.book, c, name, self.now_s))

    def deliver(self) -> Iterator[Change]:
        """A rollout comes in: by handle, inline, shared between choices, or bad."""
        lease = self._open()
        if lease is not None:
            delivery = self.delivery(lease)
            yield self._decide(lambda c: collecting.deliver(self.book, c, delivery, self.now_s))

    def delivery(self, lease: Lease) -> Delivery:
        """What the rollout of ``lease`` hands in."""
        kind = self.random.choice(["handle", "handle", "inline", "shared", "failed", "late"])
        own = file_of(lease.rollout_id, lease.policy_version)
        shared = file_of(f"{lease.group_id}.shared", lease.policy_version)
        files = {own, shared} if kind == "shared" else {own}
        sample = sample_of(lease.rollout_id, files)
        if kind == "inline":
            inline = make_sample(self.count, tokens=9, with_weight_versions=True)
            sample, files = replace(inline, rollout_id=lease.rollout_id), set()
        is_good = kind != "failed"
        return Delivery(
            rollout_id=lease.rollout_id,
            digest=f"{kind}-{lease.rollout_id}",
            reward=self.random.choice([0.0, 1.0, 0.1, -3.5]),
            is_waiting=self.random.random() < 0.7,
            samples=(sample,) if is_good else (),
            tally=Tally(samples=1, tokens=4, routing_rows=3),
            files=frozenset(files),
            files_trained=frozenset(files) if is_good else frozenset(),
            files_shared=frozenset({shared} if kind == "shared" else ()),
            drop=None if is_good else DropReason.FAILED,
            detail=self.random.choice(HARD_TEXTS),
        )

    def remove(self) -> Iterator[Change]:
        """An operator drops a rollout."""
        if self.book.held:
            name = self.random.choice(list(self.book.held))
            yield self._decide(lambda c: collecting.remove(self.book, c, name))

    def build(self) -> Iterator[Change]:
        """A step is decided, built, and shipped: three changes."""
        change = Change()
        draft = stepping.begin(self.book, change, self.now_s)
        self.book.seal(change)
        yield change
        if draft is None:
            return
        built = stepping.Built(body=b"body", digest="d" * 64, micro_batches=1)
        yield self._decide(lambda c: stepping.finish(self.book, c, draft, built, self.now_s))
        yield self._decide(lambda c: stepping.shipped(self.book, c, draft.step))
        self.shipped.append(draft.step)
        self.built += 1

    def commit(self) -> Iterator[Change]:
        """Every rank commits the oldest step; its deletions are done now and then."""
        if not self.shipped:
            return
        step = self.shipped.pop(0)
        change = self._decide(lambda c: stepping.acknowledge(self.book, c, step, self.now_s))
        yield change
        if change.delete_files and self.random.random() < 0.7:
            yield self._decide(lambda c: c.files_deleted.extend(change.delete_files))

    def go_back(self) -> Iterator[Change]:
        """The trainer restarts from an earlier checkpoint, and its engines with it."""
        last = going_back.committed_step(self.book)
        step = self.random.randint(max(0, last - 2), last)
        steps = going_back.steps_after(self.book, step)
        names = [name for some in steps.values() for name in some]
        files = {name: files_of(self.bodies[name]) for name in names}
        named = sorted(frozenset[str]().union(*files.values()))
        lost = frozenset(self.random.sample(named, k=min(len(named), self.random.choice([0, 1]))))
        remains = Remains(
            steps=steps,
            files=files,
            files_missing=lost,
            samples={name: self.bodies[name] for name in names},
        )
        lineage = self.book.lineage + 1
        yield self._decide(
            lambda c: going_back.go_back(
                self.book,
                c,
                step=step,
                remains=remains,
                now_s=self.now_s,
                start_id=f"job-{lineage}" if lineage % 3 == 0 else None,
            )
        )
        self.shipped = sorted(n for n in self.book.open_steps if n > step)
        yield self.report(step)

    def apply(self) -> Iterator[Change]:
        """Engines apply what is committed; they may fall back."""
        newest = self.book.next_step - 1 - len(self.shipped)
        version = max(0, newest - self.random.choice([0, 0, 0, 1]))
        yield self.report(version)

    def report(self, version: int) -> Change:
        """Somebody says what the engines serve."""
        source: PolicySource = self.random.choice(["push", "poll"])
        return self._decide(
            lambda c: policies.report(self.book, c, version, source=source, now_s=self.now_s)
        )

    def wait(self) -> Iterator[Change]:
        """Time passes; now and then a version's folder is swept."""
        self.now_s += self.random.choice([1.0, 20.0, 40.0])
        yield self._decide(lambda c: ending.tick(self.book, c, self.now_s))
        keep_from = min(self.book.oldest_live() or 0, self.book.next_step - 3)
        if keep_from > 0 and self.random.random() < 0.5:
            swept = self.random.randrange(keep_from)
            self.book.retention.forget(swept)
            yield self._decide(lambda c: c.versions_forgotten.append(swept))
