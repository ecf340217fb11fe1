"""The delivery machine under random histories: late, lost, restarted and failing ranks.

After the faults stop, everything must arrive: that is the last thing each history checks.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sideband.feed.delivery import Delivery
from sideband.feed.errors import FeedFull, RankRefused
from sideband.feed.facts import Abort, End, FeedPlan, GoneBack, Hello, Place, Release, Send
from sideband.ids import RunId
from tests.unit.feed.delivery_builders import facts_of

STEPS_HELD_MAX = 3


@dataclass
class Process:
    """One rank's process, written from the protocol page and not from the machine."""

    global_rank: int
    number: int
    connection: bytes | None = None
    credit: int = 1
    committed: int | None = None
    at: Place | None = None  # the next place wanted; None before the first micro batch
    lineage: int | None = None  # of what it got
    counts: dict[int, int] = field(default_factory=dict)
    unread: list[Place] = field(default_factory=list)  # received, not read
    untaken: list[int] = field(default_factory=list)
    read: Place = (0, 0)
    released: Place = (0, 0)
    told: Place = (0, 0)  # on this connection
    has_joined: bool = False
    is_aborted: bool = False
    is_ended: bool = False

    @property
    def instance(self) -> str:
        return f"process-{self.number}"

    def receive(self, send: Send) -> None:
        place = (send.step, send.index)
        assert self.at is None or place == self.at, "in order, once"
        assert not self.is_aborted
        assert not self.is_ended
        self.counts[send.step] = send.count
        self.at = after(place, send.count)
        self.unread.append(place)
        self.untaken.append(send.seq)
        assert len(self.untaken) <= self.credit, "never more than the credit"

    def release(self, place: Place) -> None:
        assert place > self.told, "each told once per connection"
        self.told = place
        self.released = max(self.released, place)


def after(place: Place, count: int) -> Place:
    step, index = place
    return (step, index + 1) if index + 1 < count else (step + 1, 0)


class DeliveryHistory(RuleBasedStateMachine):
    @initialize(rank_count=st.integers(1, 3), first=st.integers(1, 5))
    def start(self, rank_count: int, first: int) -> None:
        self.delivery = Delivery(
            FeedPlan(
                run_id=RunId("run"),
                rank_count=rank_count,
                dp_size=rank_count,
                cp_size=1,
                layout="contiguous",
                steps_held_max=STEPS_HELD_MAX,
                peer_timeout_s=10.0,
            )
        )
        self.next_step = first
        self.now_s = 0.0
        self.connections = 0
        self.numbers = rank_count
        self.generation = 1
        self.lineages = 0
        self.joined: set[int] = set()
        self.counts: dict[int, int] = {}
        self.processes = {rank: Process(rank, rank) for rank in range(rank_count)}
        self.named: set[int] = set()

    def process(self, data: st.DataObject) -> Process:
        return self.processes[data.draw(st.sampled_from(sorted(self.processes)))]

    @rule(count=st.integers(1, 3))
    def accept(self, count: int) -> None:
        try:
            assert self.delivery.held.accept(
                facts_of(self.next_step, count=count, plan=self.delivery.plan)
            )
        except FeedFull:
            assert len(self.delivery.held.steps) == STEPS_HELD_MAX
            return
        self.delivery.stir_all()
        self.counts[self.next_step] = count
        self.next_step += 1

    @rule(data=st.data(), credit=st.integers(1, 4))
    def hello(self, data: st.DataObject, credit: int) -> None:
        self.join(self.process(data), credit)

    def join(self, process: Process, credit: int) -> None:
        if process.connection is not None and not process.is_aborted:
            return
        self.connections += 1
        connection = b"c%d" % self.connections
        process.untaken, process.credit, process.told = [], credit, (0, 0)
        hello = Hello(
            instance=process.instance,
            run_id=RunId("run"),
            global_rank=process.global_rank,
            dp_rank=process.global_rank,
            cp_rank=0,
            committed_step=process.committed,
            resume=process.at,
            committed_lineage=None,
            lineage=process.lineage,
            credit=credit,
            model=None,
        )
        try:
            self.delivery.hello(connection, hello, now_s=self.now_s)
        except RankRefused as refusal:
            is_other = process.lineage not in {None, self.lineages}
            assert refusal.code in {"step_failed", "rank_in_use", "other_lineage"}  # noqa: PT017
            assert (refusal.code == "other_lineage") == is_other  # noqa: PT017
            assert process.is_aborted or refusal.code == "rank_in_use"  # noqa: PT017
            return
        assert not process.is_aborted
        process.connection, process.has_joined = connection, True
        self.joined.add(process.global_rank)
        self.tell(process, after_hello=True)

    def tell(self, process: Process, *, after_hello: bool = False) -> None:
        """What a rank repeats after WELCOME."""
        assert process.connection is not None
        rank = self.delivery.rank_of(process.connection, now_s=self.now_s)
        assert rank is not None
        if after_hello:
            self.delivery.progress(rank, seq=0, read=process.read)
        if process.committed is not None:
            self.delivery.commit(process.global_rank, process.committed)

    @rule(data=st.data(), limit=st.integers(1, 8))
    def deliver(self, data: st.DataObject, limit: int) -> None:
        self.pump(self.process(data), limit)

    def pump(self, process: Process, limit: int) -> int:
        if process.connection is None:
            return 0
        rank = self.delivery.rank_of(process.connection, now_s=self.now_s)
        assert rank is not None
        self.named.update(one.global_rank for one in self.delivery.stirred())
        told = 0
        while told < limit:
            decision = self.delivery.next_for(rank)
            if decision is None:
                self.named.discard(rank.global_rank)
                break
            assert rank.global_rank in self.named, "whoever has something coming is named"
            told += 1
            if isinstance(decision, Abort):
                process.is_aborted = True
                continue
            assert self.joined == set(self.processes), "nothing before everyone said hello"
            if isinstance(decision, Send):
                process.receive(decision)
                process.lineage = self.delivery.lineage.number
                if decision.released is not None:
                    process.release(decision.released)
            elif isinstance(decision, Release):
                process.release(decision.place)
            else:
                assert isinstance(decision, End)
                process.is_ended = True
        return told

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        self.take_one(self.process(data))

    def take_one(self, process: Process) -> None:
        rank = process.connection and self.delivery.rank_of(process.connection, now_s=self.now_s)
        if rank and process.untaken:
            self.delivery.progress(rank, seq=process.untaken.pop(0), read=process.read)

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self.read_one(self.process(data))

    def read_one(self, process: Process) -> None:
        if process.unread and not process.is_aborted:
            place = process.unread.pop(0)
            process.read = after(place, process.counts[place[0]])
            if process.connection is not None:
                rank = self.delivery.rank_of(process.connection, now_s=self.now_s)
                assert rank is not None
                self.delivery.progress(rank, seq=0, read=process.read)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.commit_one(self.process(data))

    def commit_one(self, process: Process) -> None:
        """A step may be committed when all of it was released."""
        step = (process.committed or min(self.counts, default=1) - 1) + 1
        if process.is_aborted or process.released < (step + 1, 0) or process.connection is None:
            return
        if self.delivery.commit(process.global_rank, step) is None:
            process.committed = step

    @rule(data=st.data())
    def lose_connection(self, data: st.DataObject) -> None:
        process = self.process(data)
        if process.connection is not None:
            self.delivery.leave(process.connection)
            process.connection = None

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """A new process that knows what its rank has committed; the old one fell silent."""
        process = self.process(data)
        if process.connection is not None:
            self.delivery.leave(process.connection)
        self.replace(process)

    def replace(self, process: Process) -> None:
        self.numbers += 1
        self.processes[process.global_rank] = Process(
            process.global_rank, self.numbers, committed=process.committed
        )

    @precondition(lambda self: self.joined == set(self.processes))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        process = self.process(data)
        if process.connection is None or process.is_aborted:
            return
        rank = self.delivery.rank_of(process.connection, now_s=self.now_s)
        assert rank is not None
        if self.delivery.fail(rank, rank.read[0] or 1, "broken disk"):
            self.end_generation()

    def end_generation(self) -> None:
        """Whoever had joined hears of it, now or when it says hello."""
        self.generation += 1
        self.joined = set()
        for one in self.processes.values():
            if one.connection is None:
                one.is_aborted = one.has_joined  # it will be refused
            self.pump(one, 100)
            assert one.is_aborted == one.has_joined

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        """The trainer goes back to a step that all have committed; what follows comes again."""
        base = min(self.counts) - 1
        done = [base if one.committed is None else one.committed for one in self.processes.values()]
        step = data.draw(st.integers(base, max(base, min(done))))
        self.lineages += 1
        told = GoneBack(lineage=self.lineages, step=step, last_step=self.next_step - 1)
        dropped = self.delivery.go_back(told)
        assert set(dropped) == set(range(max(min(done), step) + 1, self.next_step))
        assert self.delivery.go_back(told) == (), "known"
        self.next_step = step + 1
        for one in self.processes.values():  # what the trainer that comes has
            one.committed = None if one.committed is None else min(one.committed, step)
            if one.lineage is None and not one.is_aborted:  # it got nothing: it may be a new one
                assert not one.connection or not self.delivery.rank_of(one.connection, now_s=0.0)
                one.connection, one.has_joined = None, False
        self.end_generation()

    @invariant()
    def nothing_is_forgotten_too_early(self) -> None:
        if not self.counts:
            return
        base = min(self.counts) - 1
        committed = min(
            process.committed if process.committed is not None else base
            for process in self.processes.values()
        )
        held = self.delivery.held.steps
        assert set(held) >= set(range(max(committed, base) + 1, self.next_step))
        self.delivery.forget()

    @invariant()
    def what_is_released_was_read_by_all(self) -> None:
        everyone = self.processes.values()
        if all(process.number < len(everyone) for process in everyone):  # nobody restarted
            first = (min(self.counts, default=0), 0)  # nothing is before it
            read = min(max(p.read, first) for p in everyone)
            assert max(p.released for p in everyone) <= read

    def teardown(self) -> None:
        if not hasattr(self, "delivery"):
            return
        self.delivery.held.is_ended = True
        self.delivery.stir_all()
        for process in list(self.processes.values()):
            if process.is_aborted or (self.generation > 1 and process.connection is None):
                self.replace(process)
        for _ in range(200):
            if self.delivery.is_drained and all(p.is_ended for p in self.processes.values()):
                break
            for process in self.processes.values():
                self.join(process, 2)
                self.pump(process, 100)
                self.take_one(process)
                self.read_one(process)
                self.commit_one(process)
            self.delivery.forget()
        assert self.delivery.is_drained, "after the faults stop, everything arrives"
        assert all(process.is_ended for process in self.processes.values())
        assert self.delivery.waiting_for() == ()


TestDeliveryHistory = DeliveryHistory.TestCase
TestDeliveryHistory.settings = settings(stateful_step_count=40)
