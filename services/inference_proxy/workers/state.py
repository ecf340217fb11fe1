"""What holds for all workers: the gate, the policy versions, who was taken out by hand.

The leader alone changes it. It is small and always sent whole, with a number that grows, so that
adopting it twice, or an older one late, changes nothing.
"""

import msgspec

from services.inference_proxy.admission import Gate, GateState
from services.inference_proxy.engine import Engine
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.identity import Misfit, Weights


class EngineState(msgspec.Struct, frozen=True):
    """Of one engine: why it was taken out by hand if it is, and how often it was brought back.

    ``reports`` counts what was said of its weights: a report that says nothing new to the leader
    may be news to a worker that found older weights in an answer.
    """

    weights: Weights
    misfit: Misfit | None
    held: str | None
    returns: int
    reports: int


class SharedState(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    number: int
    is_settled: bool  # the policy version on record is known
    gate: GateState
    applied: int
    engines: dict[str, EngineState]

    def says_the_same(self, other: "SharedState | None") -> bool:
        """Whether both say the same, whatever their number."""
        return other is not None and self == msgspec.structs.replace(other, number=self.number)


class FollowingBook(EngineBook):
    """The engines in a worker that is not the leader: the applied version is what it is told.

    Health is its own: each worker probes the engines and counts its own failures. So an engine may
    be out in one worker and in another not, but what is applied is one number.
    """

    def _advance(self) -> None:
        """Left to the leader."""


def state_of(book: EngineBook, gate: Gate, *, is_settled: bool, number: int) -> SharedState:
    """What the leader says."""
    return SharedState(
        number=number,
        is_settled=is_settled,
        gate=gate.state,
        applied=book.applied,
        engines={engine.name: _state_of(engine) for engine in book},
    )


def adopt(state: SharedState, book: FollowingBook, gate: Gate) -> list[Engine]:
    """Make it hold in another worker; the engines that may serve again once they were probed."""
    gate.state = state.gate
    book.follow(state.applied)
    returned: list[Engine] = []
    for engine in book:
        its = state.engines[engine.name]
        engine.weights = its.weights
        if its.held is not None:
            engine.health = engine.health.hold(its.held)
        elif its.returns != engine.returns_total or engine.health.state == "held":
            returned.append(book.release(engine.name))
        engine.returns_total = its.returns
    return returned


def restore(state: SharedState, book: EngineBook, gate: Gate) -> None:
    """Begin a worker's life in the middle of a run.

    Engines that were not taken out count as healthy until they show otherwise: were they unknown,
    the first one that is probed would alone decide what is applied.
    """
    gate.state = state.gate
    book.follow(state.applied)
    for engine in book:
        its = state.engines[engine.name]
        engine.weights, engine.misfit = its.weights, its.misfit
        engine.asked_run = ""  # of no run: its identity is not known here, so it is asked
        health = engine.health.probe_succeeded(now_s=0.0)
        engine.health = health if its.held is None else health.hold(its.held)
        engine.returns_total, engine.reports_total = its.returns, its.reports


def _state_of(engine: Engine) -> EngineState:
    held = engine.health.reason if engine.health.state == "held" else None
    returns, reports = engine.returns_total, engine.reports_total
    return EngineState(engine.weights, engine.misfit, held, returns, reports)
