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
    may be news to a worker that found older weights in an answer. ``names_weights``: it named
    them by a policy version once, whoever was told.
    """

    weights: Weights
    misfit: Misfit | None
    held: str | None
    returns: int
    reports: int
    names_weights: bool


class SharedState(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    number: int
    is_settled: bool  # the policy version on record is known
    gate: GateState
    applied: int
    has_gone_back: bool  # the applied version was newer once
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
        has_gone_back=book.has_gone_back,
        engines={engine.name: _state_of(engine) for engine in book},
    )


def adopt(state: SharedState, book: FollowingBook, gate: Gate) -> list[Engine]:
    """Make it hold in another worker; the engines that may serve again once they were probed.

    What was said before is no news of an engine's weights: what was found here since stands.
    """
    gate.state = state.gate
    book.follow(state.applied)
    book.has_gone_back |= state.has_gone_back
    returned: list[Engine] = []
    for engine in book:
        its = state.engines[engine.name]
        _hear(engine, its)
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
    book.has_gone_back = state.has_gone_back
    for engine in book:
        its = state.engines[engine.name]
        engine.weights = engine.weights_told = its.weights
        engine.misfit, engine.names_weights = its.misfit, its.names_weights
        engine.asked_run = ""  # of no run: its identity is not known here, so it is asked
        health = engine.health.probe_succeeded(now_s=0.0)
        engine.health = health if its.held is None else health.hold(its.held)
        engine.returns_total, engine.reports_total = its.returns, its.reports


def _hear(engine: Engine, its: EngineState) -> None:
    engine.names_weights |= its.names_weights
    if (its.weights, its.reports) == (engine.weights_told, engine.reports_total):
        return
    if its.weights.policy_version >= engine.policy_version:
        engine.doubts += 1  # what was found here may be newer: only the engine knows
    engine.weights = engine.weights_told = its.weights
    engine.reports_total = its.reports


def _state_of(engine: Engine) -> EngineState:
    return EngineState(
        weights=engine.weights,
        misfit=engine.misfit,
        held=engine.health.reason if engine.health.state == "held" else None,
        returns=engine.returns_total,
        reports=engine.reports_total,
        names_weights=engine.names_weights,
    )
