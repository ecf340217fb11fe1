"""Trainers that go back, feeds that start anew, and processes that outlive both, at random.

A process that got anything of one lineage gets and commits nothing of another, and the trainer of
the last lineage gets every step of it in order, once.
"""

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sideband.feed.delivery import Delivery
from sideband.feed.errors import FeedFull, RankRefused
from sideband.feed.facts import Abort, GoneBack, Hello, Send
from tests.unit.feed.delivery_builders import PLAN, facts_of, hello_of

RANKS = range(PLAN.rank_count)
ROOMY = replace(PLAN, steps_held_max=4)


@dataclass(eq=False)
class Process:
    """One rank's process of the trainer that began with ``trainer``, written from the page."""

    rank: int
    number: int
    trainer: int
    committed: int
    lineage: int | None = None
    connection: bytes | None = None
    got: list[int] = field(default_factory=list)  # steps, each of one micro batch
    is_over: bool = False

    def hello(self) -> Hello:
        at = self.got[-1] + 1 if self.got else self.committed + 1
        return replace(
            hello_of(self.rank, instance=f"process-{self.number}"),
            committed_step=self.committed,
            resume=(at, 0),
            lineage=self.lineage,
            credit=99,
        )


class LineageHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.connections = self.numbers = 0
        self.lineage, self.start = 0, 0
        self.built = 0
        self.committed: dict[tuple[int, int], int] = {}  # by lineage and rank, rightly
        self.delivery = Delivery(ROOMY)
        self.ghosts: list[Process] = []
        self.current = {rank: self.fresh(rank) for rank in RANKS}

    def fresh(self, rank: int) -> Process:
        self.numbers += 1
        committed = self.committed.get((self.lineage, rank), self.start)
        return Process(rank, self.numbers, self.lineage, committed)

    def everyone(self) -> list[Process]:
        return [*self.current.values(), *self.ghosts]

    @property
    def is_told(self) -> bool:
        return self.delivery.lineage.number == self.lineage

    @rule()
    def restart_feed(self) -> None:
        self.delivery = Delivery(ROOMY)
        for process in self.everyone():
            process.connection = None

    @precondition(lambda self: not self.is_told)
    @rule()
    def tell(self) -> None:
        to = GoneBack(lineage=self.lineage, step=self.start, last_step=max(self.built, self.start))
        self.delivery.go_back(to)
        assert not self.delivery.is_open

    @precondition(lambda self: self.is_told)
    @rule()
    def put(self) -> None:
        last = self.delivery.held.last_step
        done = min(self.committed.get((self.lineage, rank), self.start) for rank in RANKS)
        step = done + 1 if last is None else last + 1
        try:
            self.delivery.held.accept(facts_of(step, count=1, plan=ROOMY))
        except FeedFull:
            return
        self.built = max(self.built, step)
        self.delivery.stir_all()

    @precondition(lambda self: self.is_told)
    @rule(committing=st.sets(st.sampled_from(RANKS)))
    def train(self, committing: set[int]) -> None:
        """A whole step, so that histories get somewhere."""
        self.put()
        for process in self.current.values():
            self.pump(process)
            self.join(process)
        for rank, process in self.current.items():
            self.pump(process)
            if rank in committing:
                self.commit_one(process)

    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        """Its processes live on, but for those that got nothing: they would be as new ones."""
        done = min(self.committed.get((self.lineage, rank), self.start) for rank in RANKS)
        self.start = data.draw(st.integers(0, done), "step")
        self.lineage += 1
        for process in self.current.values():
            if process.lineage is not None:
                self.ghosts.append(process)
            elif process.connection is not None:
                self.delivery.leave(process.connection)
        self.current = {rank: self.fresh(rank) for rank in RANKS}

    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(RANKS), "rank")
        old = self.current[rank]
        if old.connection is not None:
            self.delivery.leave(old.connection)
        self.current[rank] = self.fresh(rank)

    @rule(data=st.data())
    def hello(self, data: st.DataObject) -> None:
        self.join(data.draw(st.sampled_from(self.everyone()), "process"))

    def join(self, process: Process) -> None:
        if process.is_over or process.connection is not None:
            return
        self.connections += 1
        connection = b"c%d" % self.connections
        known = self.delivery.lineage.number
        is_certain = known > 0 or self.delivery.held.first_step is not None
        is_other = is_certain and process.lineage not in {None, known}
        try:
            self.delivery.hello(connection, process.hello(), now_s=0.0)
        except RankRefused as refusal:
            assert (refusal.code == "other_lineage") == is_other or refusal.code == "malformed"  # noqa: PT017
            if known == process.trainer == self.lineage:
                assert refusal.code in {"rank_in_use", "step_failed"}  # noqa: PT017
            process.is_over = refusal.retry_after_s is None
            return
        assert not is_other
        process.connection = connection

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self.pump(data.draw(st.sampled_from(self.everyone()), "process"))

    def pump(self, process: Process) -> None:
        if process.connection is None:
            return
        rank = self.delivery.rank_of(process.connection, now_s=0.0)
        if rank is None:
            process.connection = None  # RESYNC
            return
        self.delivery.stirred()
        while (decision := self.delivery.next_for(rank)) is not None:
            if isinstance(decision, Abort):
                process.is_over = True
            elif isinstance(decision, Send):
                self.receive(process, decision)

    def receive(self, process: Process, send: Send) -> None:
        assert not process.is_over
        assert process.lineage in {None, self.delivery.lineage.number}, "never of another lineage"
        assert send.step == (process.got[-1] if process.got else process.committed) + 1
        process.lineage = self.delivery.lineage.number
        process.got.append(send.step)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.commit_one(data.draw(st.sampled_from(self.everyone()), "process"))

    def commit_one(self, process: Process) -> None:
        step = process.committed + 1
        if process.is_over or not process.got or step > process.got[-1]:
            return
        try:
            abort = self.delivery.commit(process.rank, step, lineage=process.lineage)
        except RankRefused as refusal:
            assert refusal.code in {"other_lineage", "malformed"}  # noqa: PT017
            assert process.lineage != self.delivery.lineage.number
            process.is_over = True
            return
        assert abort is None
        process.committed = step
        assert process.lineage is not None
        key = (process.lineage, process.rank)
        self.committed[key] = max(step, self.committed.get(key, 0))

    @invariant()
    def what_counts_was_committed_in_this_lineage(self) -> None:
        self.delivery.forget()
        if not self.is_told:
            return
        if self.lineage == 0 and self.delivery.held.first_step is None:
            return
        for rank, step in self.delivery.committed.items():
            assert step <= self.committed.get((self.lineage, rank), self.start)

    def teardown(self) -> None:
        if not self.is_told:
            self.tell()
        for process in self.everyone():  # ghosts try once more
            self.pump(process)
            self.join(process)
        target = self.built + 2
        for _ in range(40):
            if (self.delivery.held.last_step or 0) < target:
                self.put()
            for rank, process in self.current.items():
                if process.is_over or process.lineage not in {None, self.lineage}:
                    if process.connection is not None:
                        self.delivery.leave(process.connection)
                    self.current[rank] = self.fresh(rank)
            for process in self.current.values():
                self.pump(process)
                self.join(process)
                self.commit_one(process)
            self.delivery.forget()
        assert self.delivery.committed_step == target, "after the faults stop, everything arrives"


TestLineageHistory = LineageHistory.TestCase
TestLineageHistory.settings = settings(stateful_step_count=40)
