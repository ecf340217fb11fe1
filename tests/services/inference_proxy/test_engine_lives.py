"""Whatever dies, is told and is asked in whichever order: no answer passes for newer than it is.

A model of one engine and of the two workers of a proxy. The engine has the truth: which process it
is, and which weights that has. What the workers know comes by probes, answers, reports and each
other, and nothing of it at once. Once all is quiet and the engine was brought up to date, it
serves.
"""

from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.inference_proxy.admission import Gate
from services.inference_proxy.asking import Asking
from services.inference_proxy.calls import EngineCalls
from services.inference_proxy.engine import Engine
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.identity import EngineIdentity, Said, Weights
from services.inference_proxy.metrics import Metrics
from services.inference_proxy.upstream import EngineBehind, Upstream
from services.inference_proxy.workers.state import FollowingBook, adopt, state_of
from tests.services.inference_proxy.test_sampled import engine_of, named


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What an engine says: of its process in answers, of its weights in either."""

    has_route: bool
    is_signed: bool  # answers name the process
    names_in_answers: bool
    is_named: bool  # whoever brings weights names them by their version


KINDS = {
    "vLLM 0.32 with the plugin": Kind(
        has_route=True, is_signed=True, names_in_answers=True, is_named=True
    ),
    "its OpenAI routes": Kind(
        has_route=True, is_signed=False, names_in_answers=False, is_named=True
    ),
    "weights that nobody names": Kind(
        has_route=True, is_signed=True, names_in_answers=True, is_named=False
    ),
    "vLLM 0.30 with the plugin": Kind(
        has_route=True, is_signed=True, names_in_answers=False, is_named=False
    ),
    "an earlier plugin": Kind(
        has_route=True, is_signed=False, names_in_answers=False, is_named=False
    ),
    "vLLM 0.32 alone": Kind(has_route=False, is_signed=False, names_in_answers=True, is_named=True),
    "vLLM 0.30 alone": Kind(
        has_route=False, is_signed=False, names_in_answers=False, is_named=False
    ),
}


def others_of(kind: Kind) -> list[Kind]:
    """Kinds that an engine may be after it was one; whoever brings weights stays the same."""
    kinds = [one for one in KINDS.values() if one.is_named == kind.is_named]
    at = kinds.index(kind)
    return kinds[at + 1 :] + kinds[:at]


@dataclass(frozen=True)
class Life:
    """The truth: one process, and the weights that it has."""

    process: int = 0
    version: int = 0


@dataclass(frozen=True)
class Answer:
    """What an engine gave: what it shows, and the truth."""

    names: list[dict[str, Any]]
    process: str | None
    version: int


@dataclass(frozen=True)
class Request:
    """Under way, with what was known when it went out; its answer may wait to be looked at."""

    worker: int
    version: int
    known: Weights
    answer: Answer | None = None


class Truth(Asking):
    """The engine as it is, asked without a network."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.life = kind, Life()

    async def ask(self, engine: Engine, *, timeout_s: float) -> Said:
        """What it says now."""
        return self.said()

    def said(self) -> Said:
        identity = EngineIdentity(
            is_by_handle=True, policy_version=self.life.version if self._is_named else None
        )
        return Said(identity=identity if self.kind.has_route else None, process=self.process)

    def answer(self) -> Answer:
        """What it samples now."""
        name = str(self.life.version) if self._is_named else "default"
        return Answer(
            names=named(name) if self.kind.names_in_answers else [{}],
            process=self.process if self.kind.is_signed else None,
            version=self.life.version,
        )

    @property
    def process(self) -> str:
        return f"process {self.life.process}"

    @property
    def _is_named(self) -> bool:
        return self.kind.is_named and self.life.version > 0


class Worker:
    """One worker: its book, its calls, and the probe that is under way in it."""

    def __init__(self, truth: Truth, kind: type[EngineBook]) -> None:
        _, self.engine = engine_of()
        self.book, self._truth = kind([self.engine]), truth
        metrics = Metrics(CollectorRegistry())
        upstream = cast("Upstream", None)  # nothing is sent
        self.calls = EngineCalls(upstream, truth, self.book, token=None, metrics=metrics)
        self.asked: tuple[Weights, int] | None = None
        self.heard: Said | None = None

    def begin_probe(self) -> None:
        self.asked, self.heard = (self.engine.weights, self.engine.doubts), None

    def end_probe(self) -> None:
        assert self.asked is not None
        known, doubts = self.asked
        if self.heard is not None:
            self.book.told(self.engine, self.heard, run_id=None, known=known, doubts=doubts)
        self.book.probed(self.engine, now_s=0.0)
        self.asked = None

    def probe(self) -> None:
        """All of it at once."""
        self.begin_probe()
        if self.book.must_ask(self.engine, run_id=None):
            self.heard = self._truth.said()
        self.end_probe()


class Lives:
    """A run, event by event. An event has two bits: which worker, and one more."""

    def __init__(self, kind: Kind, *, recorded: int, has_them: bool) -> None:
        """The proxy starts, perhaps in the middle of a run, perhaps after its host went down."""
        self.truth, self.newest = Truth(kind), recorded
        self.truth.life = Life(version=recorded if has_them else 0)
        self.begin()

    def begin(self) -> None:
        self.workers = [Worker(self.truth, kind) for kind in (EngineBook, FollowingBook)]
        self.number = 0
        self.requests: list[Request] = []
        self.workers[0].book.begin_at(self.newest)
        self.publish()

    def publish(self) -> None:
        leader, follower = self.workers
        self.number += 1
        state = state_of(leader.book, Gate(), is_settled=True, number=self.number)
        assert isinstance(follower.book, FollowingBook)
        adopt(state, follower.book, Gate())

    def happens(self, event: str, worker: int, flag: bool) -> None:
        it = self.workers[worker]
        match event:
            case "the proxy is started anew":
                self.begin()
            case "the engine is started anew":  # nobody sees it; what it had not answered is lost
                self.truth.life = Life(self.truth.life.process + 1)
                if flag:  # as an engine is upgraded
                    self.truth.kind = others_of(self.truth.kind)[worker]
                self.requests = [one for one in self.requests if one.answer is not None]
            case "something fails":
                it.book.failed(it.engine, "broke off", now_s=0.0, is_dead=flag)
            case "it gets new weights":
                self.get_weights(self.newest + 1, answers=flag)
            case "it gets them again":
                self.get_weights(self.newest, answers=flag)
            case "the leader tells":
                self.publish()
            case "the leader looks":
                self.look()
            case "a probe begins":
                it.begin_probe()
            case "it is heard" if it.asked is not None:
                it.heard = it.heard or self.truth.said()
            case "a probe ends" if it.asked is not None:
                it.end_probe()
            case "a probe":
                it.probe()
            case "a request" if it.book.is_serving(it.engine):
                self.requests.append(Request(worker, it.book.applied, it.engine.weights))
            case "an answer" if self.requests:
                request = self.requests.pop(0)
                answer = request.answer or self.truth.answer()
                self.requests.append(replace(request, answer=answer))
            case "it is looked at" if self.requests:
                request = self.requests.pop(-flag)
                answer = request.answer or self.truth.answer()
                self.is_taken(replace(request, answer=answer))

    def get_weights(self, version: int, *, answers: bool) -> None:
        """It is reported at once, and perhaps does not say then which process it is. One that was
        never heard of does: it would be bound to the next that answers.
        """
        self.newest = version
        self.truth.life = Life(self.truth.life.process, version)
        answers |= self.workers[0].engine.weights.process is None
        processes = {"e0": self.truth.process} if answers else {}
        self.workers[0].book.report(version, processes=processes)
        self.publish()

    def look(self) -> None:
        """As ``Team`` hears what another worker has found."""
        leader, follower = (one.engine for one in self.workers)
        leader.names_weights |= follower.names_weights
        leader.doubts += follower.is_older_than_told and not leader.is_doubted

    def is_taken(self, request: Request) -> bool:
        it, answer = self.workers[request.worker], request.answer
        assert answer is not None
        checking = it.calls.check_weights(
            it.engine,
            answer.names,
            policy_version=request.version,
            known=request.known,
            process=answer.process,
        )
        try:
            ran(checking)
        except EngineBehind:
            return False
        assert answer.version >= request.version, "older weights sampled it"
        return True

    def serves_in_the_end(self) -> bool:
        """Once all is quiet and it was brought up to date."""
        for it in self.workers:
            it.asked = None
        self.get_weights(self.newest + 1, answers=True)
        for _ in range(3):
            for it in self.workers:
                it.probe()
            self.look()
            self.publish()
        requests = [
            Request(number, self.newest, it.engine.weights, self.truth.answer())
            for number, it in enumerate(self.workers)
            if it.book.is_serving(it.engine) and it.book.applied == self.newest
        ]
        return len(requests) == len(self.workers) and all(map(self.is_taken, requests))


def ran(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run it to its end: it never waits."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


HAPPENINGS = (
    "the proxy is started anew",
    "the engine is started anew",
    "something fails",
    "it gets new weights",
    "it gets them again",
    "the leader tells",
    "the leader looks",
    "a probe begins",
    "it is heard",
    "a probe ends",
    *["a probe"] * 2,
    *["a request"] * 3,
    *["an answer"] * 2,
    *["it is looked at"] * 3,
)
EVENTS = st.tuples(st.sampled_from(HAPPENINGS), st.integers(0, 1), st.booleans())


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=100, deadline=None, phases=[Phase.generate])  # it would shrink for minutes
@given(
    recorded=st.integers(0, 2),
    has_them=st.booleans(),
    events=st.lists(EVENTS, min_size=60, max_size=60),
)
def test_no_answer_passes_for_newer_than_it_is_and_the_engine_serves_in_the_end(
    name: str, recorded: int, has_them: bool, events: list[tuple[str, int, bool]]
) -> None:
    lives = Lives(KINDS[name], recorded=recorded, has_them=has_them)
    for event in events:
        lives.happens(*event)
    assert lives.serves_in_the_end(), [it.book.why_out(it.engine) for it in lives.workers]
