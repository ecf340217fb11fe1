"""Who may get what next, and what may be forgotten: decisions without sockets or clocks.

``Delivery`` is a state machine. Events go in by method (a step was accepted, a rank said
hello, made progress, committed, failed, fell silent); decisions come out of ``next_for(rank)``, one
at a time, each told once per connection, for the ranks that ``stirred`` names. The adapter in
``server.py`` moves the bytes. Laws, each tested on random histories:

- nothing is sent before every global rank has said hello in this generation;
- a connection gets micro batches in order, each once, never more than its credit ahead;
- a step is forgotten only when every global rank has committed it;
- a micro batch is released only when every rank has read it;
- after a failure, or when the trainer goes back, no process of that generation gets anything but
  ABORT, and no commit of a step that was not sent since then counts;
- nothing is sent to a process that got micro batches of another lineage, and it commits nothing.

Not thread-safe: one owner.
"""

from collections.abc import Mapping

from sideband.feed import waiting
from sideband.feed.admission import admitted, check_commit, check_identity, check_successor
from sideband.feed.commits import Commits
from sideband.feed.facts import (
    Abort,
    Decision,
    End,
    Failure,
    FeedPlan,
    GoneBack,
    Hello,
    Place,
    RankState,
    Release,
    Send,
    StepFacts,
    after,
)
from sideband.feed.held import HeldSteps
from sideband.feed.lineage import Lineage
from sideband.feed.released import Released


class Delivery:
    """One run's delivery. See the module for the laws."""

    def __init__(self, plan: FeedPlan) -> None:
        self.plan = plan
        self.held = HeldSteps(plan)
        self.ranks: dict[int, RankState] = {}
        self._commits = Commits(plan.rank_count)
        self.generation = 1
        self.failure: Failure | None = None
        self.lineage = Lineage()
        self._released = Released()
        self._stirred: set[int] = set()
        self._joined_count = 0  # ranks of this generation
        self._by_connection: dict[bytes, int] = {}

    @property
    def is_open(self) -> bool:
        """Every global rank has said hello in this generation."""
        return self._joined_count == self.plan.rank_count

    @property
    def released(self) -> Place:
        """Every rank has read everything before this place."""
        self._settle_reads()
        return self._released.place

    def _settle_reads(self) -> None:
        if self.is_open and self._released.settle(lambda: (r.read for r in self.ranks.values())):
            self.stir_all()

    def stir_all(self) -> None:
        """Whatever the ranks had to be told may have changed: a step came, a pause ended."""
        self._stirred.update(self.ranks)

    def stirred(self) -> list[RankState]:
        """The ranks for which ``next_for`` may have something since the last call."""
        self._settle_reads()
        found = [self.ranks[index] for index in self._stirred]
        self._stirred.clear()
        return found

    @property
    def is_drained(self) -> bool:
        """No more steps will come, and every rank has committed all of them."""
        return self.held.is_ended and not self.held.steps

    @property
    def committed(self) -> Mapping[int, int]:
        """The last committed step by global rank; it outlives the rank's processes."""
        return self._commits.steps

    @property
    def committed_step(self) -> int | None:
        """The last step that every global rank has committed; None before the first step."""
        return None if self.held.first_step is None else self._commits.least(base=self._base)

    @property
    def _base(self) -> int:
        """What counts as committed by a rank that has not committed anything."""
        return (self.held.first_step or 1) - 1

    @property
    def is_untold(self) -> bool:
        """It may not be of the run's lineage yet: a step comes after all that is to be told."""
        return self.held.first_step is None and self.lineage.gone_back is None

    def accept(self, facts: StepFacts) -> bool:
        """Hold a step, as ``HeldSteps.accept``: ranks may have committed it already."""
        self._commits.has_news = True
        return self.held.accept(facts, committed_step=self.committed_step)

    def hello(self, connection: bytes, hello: Hello, *, now_s: float) -> RankState:
        """A rank joins, or joins again. Raises RankRefused with a code of the protocol."""
        known, recorded = self.ranks.get(hello.global_rank), self.committed.get(hello.global_rank)
        check_identity(hello, self.plan, self.held.model)
        self.lineage.check(hello.lineage, hello.committed_step, is_untold=self.is_untold)
        self.lineage.check_restored(hello, is_untold=self.is_untold)
        check_commit(hello.committed_step, last_step=self.held.last_step, plan=self.plan)
        check_successor(hello, known, generation=self.generation)
        rank, committed = admitted(
            hello,
            known,
            connection,
            generation=self.generation,
            recorded=recorded,
            first_available=self.held.first_available,
            now_s=now_s,
        )
        if known is not None and known.connection is not None:
            self._by_connection.pop(known.connection, None)
        self.leave(connection)  # a connection speaks for one rank only
        self._settle_reads()  # what was released before a new process begins again stays released
        self._released.ranks_changed()
        if known is None or known.generation != self.generation:
            self._joined_count += 1
        self.ranks[hello.global_rank] = rank
        self._by_connection[connection] = hello.global_rank
        if committed is not None and committed != recorded:
            self._commits.claim(rank.global_rank, committed, lineage=hello.lineage, base=self._base)
        if self.is_open:
            self.failure = None  # everybody came back
        self.stir_all()
        return rank

    def rank_of(self, connection: bytes, *, now_s: float) -> RankState | None:
        """The rank behind a connection, marked as seen; None: tell it to say hello."""
        index = self._by_connection.get(connection)
        if index is None:
            return None
        rank = self.ranks[index]
        rank.last_seen_s = now_s
        return rank

    def progress(self, rank: RankState, *, seq: int, read: Place) -> None:
        """Credit comes back for every micro batch up to ``seq``; all before ``read`` is read."""
        rank.seq_taken = max(rank.seq_taken, min(seq, rank.seq_sent))
        self._stirred.add(rank.global_rank)
        if rank.generation == self.generation and read > rank.read:
            self._released.rank_read_on(rank.read)
            rank.read = read

    def commit(self, global_rank: int, step: int, *, lineage: int | None = None) -> Abort | None:
        """Record a commit of ``step`` and all before; an Abort instead when that step failed.

        Raises RankRefused for a step that no feed of this run can have sent in this lineage.
        """
        self.lineage.check(lineage, step, is_untold=self.is_untold)
        check_commit(step, last_step=self.held.last_step, plan=self.plan)
        if self.failure is not None and step >= self.failure.step:
            return Abort(self.failure.step, self.failure.reason)
        self._commits.record(global_rank, step, lineage=lineage, base=self._base)
        return None

    def forget(self) -> tuple[int, ...]:
        """Drop the steps that every rank has committed, and name them."""
        if not self._commits.take_news():
            return ()
        gone = self.held.forget(committed_step=self.committed_step)
        if gone:
            self.stir_all()  # a rank that was still to get one of them goes on behind it
        return gone

    def fail(self, rank: RankState, step: int, reason: str) -> bool:
        """The rank gives up: its whole generation aborts. False: known already."""
        if rank.generation != self.generation:
            return False
        self.failure = Failure(step=step, rank=rank.global_rank, reason=reason)
        self._end_generation(Abort(step, reason))
        return True

    def go_back(self, to: GoneBack) -> tuple[int, ...]:
        """The trainer went back: its processes abort, new ones get ``to.step`` + 1 as the next.

        The steps that were dropped. What is known changes nothing. Whoever got nothing yet may be
        a new one, and is asked again; a feed that was started anew asks all that came back to it.
        Raises LineageConflict.
        """
        is_new = self.held.first_step is None
        if not self.lineage.begin(to, is_new_feed=is_new):
            return ()
        dropped = self.held.go_back(to.step)
        here = [rank for rank in self.ranks.values() if rank.generation == self.generation]
        if is_new:  # what was only claimed in a hello is forgotten; commits of this lineage stay
            self._commits.keep(lambda *said: self.lineage.refusal(*said) is None)
            self._ask_again(here)
            self._end_barrier()
        else:
            self._commits.restart(to.step)
            self.failure = None
            self._ask_again([rank for rank in here if rank.has_nothing])
            self._end_generation(Abort(to.step + 1, f"the trainer went back to step {to.step}"))
        return dropped

    def _ask_again(self, ranks: list[RankState]) -> None:
        """They joined before this feed was told of the lineage: each says hello again."""
        for rank in ranks:
            if rank.connection is not None:
                self.leave(rank.connection)
            del self.ranks[rank.global_rank]
        self._stirred.clear()
        self.stir_all()

    def _end_generation(self, abort: Abort) -> None:
        self.generation += 1
        self._end_barrier()
        for one in self.ranks.values():
            if one.abort is None:
                one.abort = abort
        self.stir_all()

    def _end_barrier(self) -> None:
        self._joined_count = 0
        self._released.restart()

    def leave(self, connection: bytes) -> RankState | None:
        """The connection is gone (goodbye, unreachable or silent); its rank may come back."""
        index = self._by_connection.pop(connection, None)
        if index is None:
            return None
        self.ranks[index].connection = None
        return self.ranks[index]

    def tick(self, *, now_s: float) -> tuple[RankState, ...]:
        """The ranks that became lost by silence. A rank lost for too long fails its step."""
        lost = []
        for rank in self.ranks.values():
            silent_s = now_s - rank.last_seen_s
            if rank.connection is not None and silent_s > self.plan.peer_timeout_s:
                self.leave(rank.connection)
                lost.append(rank)
        if (absent := waiting.absent_too_long(self, now_s=now_s)) is not None:
            self.fail(*absent)
        return tuple(lost)

    def waiting_for(self) -> tuple[int, ...]:
        """The ranks that hold the others up: absent ones, else those that have read least."""
        return waiting.waiting_for(self)

    def next_for(self, rank: RankState) -> Decision | None:
        """What to tell this rank now; it counts as told. None: nothing until an event."""
        if rank.connection is None:
            return None
        if rank.abort is not None:
            abort = None if rank.is_abort_told else rank.abort
            rank.is_abort_told = True
            return abort
        if not self.is_open:
            return None
        self._settle_reads()
        released: Place | None = None
        if rank.told_release != self._released.place:
            rank.told_release = released = self._released.place
        if (send := self._send_for(rank, released)) is not None:
            return send
        return self._end_for(rank) if released is None else Release(released)

    def _send_for(self, rank: RankState, released: Place | None) -> Send | None:
        rank.next = max(rank.next, (self.held.oldest or 0, 0))
        step, index = rank.next
        facts = self.held.get(step)
        has_credit = rank.seq_sent - rank.seq_taken < rank.credit
        if facts is None or self.held.is_paused or not has_credit:
            return None
        rank.seq_sent += 1
        self.lineage.sent(step)
        rank.next = after((step, index), facts.count)
        return Send(step, index, facts.count, rank.seq_sent, released)

    def _end_for(self, rank: RankState) -> End | None:
        last = self.held.last_step or 0
        is_behind = last > 0 and rank.next < (last + 1, 0)
        if not self.held.is_ended or rank.is_end_told or is_behind:
            return None
        rank.is_end_told = True
        return End(last)
