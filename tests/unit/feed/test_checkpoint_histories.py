"""Trainers that restart from checkpoints of any age, while run and feed go back and start anew.

The model is plain: weights are the list of steps that are in them, each with the lineage in which
it was trained, and a return takes back every later step that was trained before it. No process ever
trains on weights with a step that was taken back, nor does a feed welcome one; and whoever restores
what is of the run is never refused for it. The rank's session and the feed's answers are the real
ones, message by message; the run knows its returns as the orchestrator does, kept or told late.
"""

import json
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from sideband.feed.ancestry import Line, line_after
from sideband.feed.answers import Answerer
from sideband.feed.delivery import Delivery
from sideband.feed.errors import FeedFull, RankRefused, StepFailed, StepMissing
from sideband.feed.facts import Abort, Decision, End, GoneBack, Release, Send, after
from sideband.feed.frames import encode_message
from sideband.feed.messages import (
    AbortMessage,
    Header,
    HelloMessage,
    MicroBatchMessage,
    ReleaseMessage,
    WelcomeMessage,
)
from sideband.feed.observer import FeedObserver
from sideband.feed.resume import ResumePoint, restored_point
from sideband.feed.session import RankSession
from tests.unit.feed.delivery_builders import PLAN, facts_of

RANKS = range(PLAN.rank_count)
ROOMY = replace(PLAN, steps_held_max=4)
Trained = tuple[tuple[int, int], ...]  # weights: each step that is in them, and its lineage
GHOSTS_MAX = 4
ACTIONS = 150  # of one history


@dataclass(frozen=True)
class Checkpoint:
    """What a trainer kept: weights, and what it was told to keep with them (as a file has it)."""

    weights: Trained = ()
    kept: str = "null"

    @property
    def step(self) -> int:
        """The last step that is in it."""
        return self.weights[-1][0] if self.weights else 0


@dataclass(eq=False)
class Process:
    """One rank's process, with the library's own session."""

    rank: int
    number: int
    weights: Trained
    session: RankSession
    connection: bytes = b""
    batch: MicroBatchMessage | None = None  # the last that it took

    @property
    def is_over(self) -> bool:
        """It has raised."""
        return self.session.error is not None

    @property
    def step(self) -> int:
        """The last that is in its weights."""
        return self.weights[-1][0] if self.weights else 0


def session_of(checkpoint: Checkpoint, *, rank: int, number: int) -> RankSession:
    """As ``RankFeed`` makes it."""
    point = restored_point(json.loads(checkpoint.kept), run_id=None, committed_step=None)
    hello = HelloMessage(
        instance=f"process-{number}",
        run_id="run",
        dp_rank=0,
        cp_rank=rank,
        committed_step=0 if point is None else point.step,
        committed_lineage=None if point is None else point.lineage,
        credit=9,
    )
    return RankSession(hello=hello, peer_timeout_s=1e9)


def message_of(decision: Decision, *, lineage: int) -> Header:
    """What the feed's server sends for it."""
    match decision:
        case Send(step, index, count, _, released):
            return MicroBatchMessage(
                run_id="run", lineage=lineage, step=step, index=index, count=count, fields=(),
                released=released,
            )  # fmt: skip
        case Release((step, index)):
            return ReleaseMessage(step=step, index=index)
        case Abort(step, reason):
            return AbortMessage(step=step, reason=reason)
        case End():
            raise AssertionError("no run ends here")


@dataclass
class Run:
    """What the orchestrator's ledger has."""

    returns: list[tuple[int, int]] = field(default_factory=list)  # lineage, step
    line: Line = ()
    done: int = 0  # committed by all, as it knows
    built: int = 0

    @property
    def lineage(self) -> int:
        """How often the trainer went back."""
        return len(self.returns)

    def go_back(self, step: int) -> None:
        """The trainer restarts from ``step``."""
        self.returns.append((self.lineage + 1, step))
        self.line = line_after(self.line, lineage=self.lineage, step=step)
        self.done = step

    def took_back(self, weights: Trained, *, until: int) -> bool:
        """Whether a return up to lineage ``until`` took back anything that is in them."""
        returns = self.returns[:until]
        return any(
            lineage < begun and step > back for step, lineage in weights for begun, back in returns
        )


class History:
    """One run's, with what ``rng`` chooses."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.run, self.delivery = Run(), Delivery(ROOMY)
        self.numbers, self.now_s = 0, 0.0
        self.kept: dict[int, list[Checkpoint]] = {rank: [Checkpoint()] for rank in RANKS}
        self.ghosts: list[Process] = []
        self.current = {rank: self.new_process(rank, Checkpoint()) for rank in RANKS}

    def new_process(self, rank: int, checkpoint: Checkpoint) -> Process:
        self.numbers += 1
        session = session_of(checkpoint, rank=rank, number=self.numbers)
        return Process(rank, self.numbers, checkpoint.weights, session)

    def everyone(self) -> list[Process]:
        return [*self.current.values(), *self.ghosts]

    def is_told(self) -> bool:
        return self.delivery.lineage.number == self.run.lineage

    # --- those who serve ---------------------------------------------------------------------

    def restart_feed(self) -> None:
        self.delivery = Delivery(ROOMY)
        for process in self.everyone():
            process.connection = b""
            process.session.rejoin(now_s=self.now_s)

    def tell(self) -> None:
        if self.is_told():
            return
        *earlier, (lineage, step) = self.run.line
        last = max(self.run.built, step)
        told = GoneBack(lineage=lineage, step=step, last_step=last, earlier=tuple(earlier))
        self.delivery.go_back(told)

    def put(self) -> None:
        if not self.is_told():
            return
        last = self.delivery.held.last_step
        step = self.run.done + 1 if last is None else last + 1
        try:
            self.delivery.held.accept(facts_of(step, count=1, plan=ROOMY))
        except FeedFull:
            return
        self.run.built = max(self.run.built, step)
        self.delivery.stir_all()

    def go_back(self) -> None:
        """To a step of which every rank has a checkpoint that is of the run, seldom far."""
        steps = self.common_steps()
        self.run.go_back(max(self.rng.choices(steps, k=3)))
        if self.rng.random() < 0.5:
            self.tell()

    def common_steps(self) -> list[int]:
        steps: set[int] = set.intersection(*(set(self.valid(rank)) for rank in RANKS))
        return [step for step in sorted(steps) if step <= self.run.done]

    def valid(self, rank: int) -> dict[int, Checkpoint]:
        """By step, the latest of a rank that holds nothing that was taken back."""
        return {
            checkpoint.step: checkpoint
            for checkpoint in self.kept[rank]
            if not self.run.took_back(checkpoint.weights, until=self.run.lineage)
        }

    # --- those who train ---------------------------------------------------------------------

    def restart_rank(self) -> None:
        """From any checkpoint that it ever kept; the process of before may live on."""
        rank, is_ghost = self.rng.choice(RANKS), self.rng.random() < 0.3
        near = [one for one in self.kept[rank] if abs(one.step - self.run.done) <= 2]
        self.replace(rank, self.rng.choice(near or self.kept[rank]), is_ghost=is_ghost)

    def restart_trainer(self) -> None:
        """All ranks, from a checkpoint of the run that goes on from what it has."""
        for rank in RANKS:
            found = self.valid(rank)
            at = [step for step in found if step >= self.run.done]
            self.replace(rank, found[self.rng.choice(at or sorted(found))], is_ghost=False)

    def replace(self, rank: int, checkpoint: Checkpoint, *, is_ghost: bool) -> None:
        old = self.current[rank]
        if is_ghost and len(self.ghosts) < GHOSTS_MAX:
            self.ghosts.append(old)
        elif old.connection:
            self.delivery.leave(old.connection)
        self.current[rank] = self.new_process(rank, checkpoint)

    def exchange(self) -> None:
        self.exchange_of(self.rng.choice(self.everyone()))

    def train(self) -> None:
        self.train_one(self.rng.choice(self.everyone()), keeps=self.rng.random() < 0.8)

    def train_all(self) -> None:
        """A whole step, so that histories get somewhere; whoever has ended is started anew."""
        self.put()
        if all(process.is_over for process in self.current.values()):
            self.restart_trainer()
        for _ in range(2):
            for process in self.current.values():
                self.exchange_of(process)
        for process in self.current.values():
            self.train_one(process, keeps=self.rng.random() < 0.8)

    def exchange_of(self, process: Process) -> None:
        """What its connection's thread does: say what is due, take what comes."""
        self.now_s += 2.0  # whatever is repeated is due
        if process.is_over:
            if process.connection:
                self.delivery.leave(process.connection)
            return
        if not process.connection:
            process.connection = b"c%d-%d" % (process.number, int(self.now_s))
        self.say(process, process.session.due(now_s=self.now_s))
        rank = self.delivery.rank_of(process.connection, now_s=self.now_s)
        self.delivery.stirred()
        while rank is not None and (decision := self.delivery.next_for(rank)) is not None:
            message = message_of(decision, lineage=self.delivery.lineage.number)
            body = b"" if isinstance(message, MicroBatchMessage) else None
            self.say(process, process.session.on_message(message, body, now_s=self.now_s))

    def say(self, process: Process, headers: list[Header]) -> None:
        answerer = Answerer(self.delivery, FeedObserver())
        for header in headers:
            is_untold, lineage = self.delivery.is_untold, self.delivery.lineage.number
            frames = encode_message(header)
            for answer in answerer.answers(process.connection, frames, now_s=self.now_s):
                if isinstance(answer, WelcomeMessage) and not is_untold:
                    assert not self.run.took_back(process.weights, until=lineage)
                self.say(process, process.session.on_message(answer, None, now_s=self.now_s))
        if process.is_over:
            self.check_end(process)
        self.delivery.forget()
        if self.is_told() and self.delivery.committed_step is not None:
            self.run.done = max(self.run.done, self.delivery.committed_step)

    def check_end(self, process: Process) -> None:
        """Why it ended is so."""
        error, lineage = process.session.error, self.delivery.lineage.number
        if isinstance(error, StepMissing):  # it joined a feed that had no step yet
            assert error.expected < (self.delivery.held.first_available or 0, 0)
            return
        assert isinstance(error, StepFailed | RankRefused)
        if isinstance(error, StepFailed) and error.reason.startswith("expected step"):
            return  # another one raised StepMissing: that fails the step for all
        if isinstance(error, StepFailed) or error.code == "step_forgotten":
            assert process.session.lineage is not None, "who got nothing asks again"
            return
        assert error.code in {"went_back", "other_lineage"}, str(error)
        is_other = process.session.lineage not in {None, lineage}
        assert is_other or self.run.took_back(process.weights, until=lineage), str(error)

    def train_one(self, process: Process, *, keeps: bool) -> None:
        """An optimizer step, a checkpoint perhaps, a commit."""
        session = process.session
        if session.error is not None or not session.arrived:
            return
        batch = session.take().message
        session.note_read(after((batch.step, batch.index), batch.count))
        assert batch.step == process.step + 1, "each step once, in order"
        assert not self.run.took_back(process.weights, until=batch.lineage)
        process.weights = (*process.weights, (batch.step, batch.lineage))
        point = ResumePoint(run_id=batch.run_id, lineage=batch.lineage, step=batch.step)
        if keeps:
            self.kept[process.rank].append(Checkpoint(process.weights, json.dumps(point)))
        if process.connection:
            self.say(process, session.want_commit(batch.step))

    def end(self) -> None:
        """The faults stop: the trainer goes back to what it has, and everything arrives."""
        for process in self.everyone():
            self.exchange_of(process)
        self.run.go_back(self.common_steps()[-1])
        self.tell()
        for process in self.everyone():  # ghosts try once more, and leave
            self.exchange_of(process)
            if process.connection:
                self.delivery.leave(process.connection)
        self.ghosts = []
        for rank in RANKS:
            self.replace(rank, self.valid(rank)[self.run.done], is_ghost=False)
        target = self.run.done + 3
        for _ in range(12):
            if (self.delivery.held.last_step or 0) < target:
                self.put()
            for process in self.current.values():
                self.exchange_of(process)
                self.train_one(process, keeps=True)
        for process in self.current.values():
            assert not process.is_over, str(process.session.error)
            assert [step for step, _ in process.weights] == list(range(1, target + 1))
            assert not self.run.took_back(process.weights, until=self.run.lineage)
        assert self.run.done == target


WEIGHTS: Final = {
    History.train_all: 10,
    History.exchange: 4,
    History.tell: 4,
    History.restart_rank: 3,
    History.train: 2,
    History.put: 2,
    History.go_back: 2,
    History.restart_trainer: 1,
    History.restart_feed: 1,
}


@given(st.integers(0, 2**32 - 1))
def test_nothing_is_trained_on_that_was_taken_back_and_what_counts_is_let_in(seed: int) -> None:
    rng = Random(seed)
    history = History(rng)
    for action in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=ACTIONS):
        action(history)
    history.end()
