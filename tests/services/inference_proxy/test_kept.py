"""The store of kept turns: bounded, by name, and never quietly incomplete."""

from collections.abc import Callable
from typing import Any

import pytest

from services.inference_proxy.kept import KeptTurns
from services.inference_proxy.kept_turn import KeptTurn, TurnRef
from services.inference_proxy.prompts import Prompt
from services.inference_proxy.recording import EncodedChoice
from services.inference_proxy.turn_problems import (
    TurnAmbiguous,
    TurnGone,
    TurnIncomplete,
    TurnOfOtherRun,
    TurnProblem,
    TurnRunning,
    TurnUnknown,
)
from sideband.ids import RequestId, RunId, SessionId

S = SessionId("s1")


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def store(*, turns_max: int = 4, bytes_max: int = 1000, clock: Clock | None = None) -> KeptTurns:
    return KeptTurns(
        turns_max=turns_max, bytes_max=bytes_max, age_s_max=10.0, clock_s=clock or Clock()
    )


def turn(
    name: str,
    *,
    session: SessionId | None = S,
    prompt: int = 0,
    run: str | None = "run-1",
    choices: dict[int, bytes | None] | None = None,
    at_s: float = 0.0,
) -> KeptTurn:
    return KeptTurn(
        request_id=RequestId(name),
        session_id=session,
        run_id=None if run is None else RunId(run),
        prompt=Prompt.of([prompt]),
        choices={
            index: EncodedChoice(None if encoded is None else (encoded,))
            for index, encoded in (choices or {0: name.encode()}).items()
        },
        at_s=at_s,
    )


def refs(*names: str, choice: int = 0) -> list[TurnRef]:
    return [TurnRef(request_id=RequestId(name), choice=choice) for name in names]


def fails(kind: type[TurnProblem], call: Callable[[], Any], said: str | None = None) -> TurnProblem:
    with pytest.raises(kind, match=said) as caught:
        call()
    assert type(caught.value) is kind
    return caught.value


def by_session(kept: KeptTurns, *, choice: int = 0, run: str | None = None) -> list[bytes]:
    run_id = None if run is None else RunId(run)
    return [b"".join(t) for t in kept.find_session(S, choice=choice, run_id=run_id).encoded()]


def fetched(kept: KeptTurns, turns: list[TurnRef], *, run_id: RunId | None) -> list[bytes]:
    return [b"".join(each) for each in kept.find(turns, run_id=run_id).encoded()]


def test_turns_are_given_in_the_order_asked_for_and_of_a_session_as_answered() -> None:
    kept = store()
    for name in ("a", "b", "c"):
        kept.put(turn(name))
    kept.put(turn("other", session=None))
    assert fetched(kept, refs("c", "a"), run_id=None) == [b"c", b"a"]
    assert fetched(kept, refs("a", "a"), run_id=RunId("run-1")) == [b"a", b"a"]
    assert by_session(kept) == [b"a", b"b", b"c"]


def test_the_oldest_go_when_there_are_too_many_or_too_much() -> None:
    kept = store(turns_max=3)
    for name in ("a", "b", "c", "d"):
        kept.put(turn(name))
    assert len(kept) == 3
    assert fails(TurnGone, lambda: fetched(kept, refs("a"), run_id=None)).request_id == "a"
    assert fetched(kept, refs("d"), run_id=None) == [b"d"]
    small = store(bytes_max=10)
    small.put(turn("a", choices={0: b"x" * 6}))
    small.put(turn("b", choices={0: b"x" * 6}))
    assert (len(small), small.size_bytes) == (1, 6)
    small.put(turn("c", choices={0: b"x" * 11}))
    assert (len(small), small.size_bytes) == (1, 6), "what is too large pushes nothing out"
    problem = fails(TurnGone, lambda: fetched(small, refs("c"), run_id=None), "larger")
    assert isinstance(problem, TurnGone)
    assert problem.reason == "too_large"


def test_an_old_turn_goes() -> None:
    clock = Clock()
    kept = store(clock=clock)
    kept.put(turn("a", at_s=0.0))
    kept.put(turn("b", at_s=5.0))
    clock.now_s = 9.9
    assert by_session(kept) == [b"a", b"b"]
    clock.now_s = 10.0
    fails(TurnGone, lambda: fetched(kept, refs("a"), run_id=None), "for its time")
    assert fetched(kept, refs("b"), run_id=None) == [b"b"]


def test_a_session_that_lost_a_turn_is_not_given_without_it() -> None:
    kept = store(turns_max=2)
    for name in ("a", "b", "c"):
        kept.put(turn(name))
    problem = fails(TurnGone, lambda: by_session(kept), "a turn of it")
    assert (problem.session_id, problem.request_id) == ("s1", None)
    assert fetched(kept, refs("b", "c"), run_id=None) == [b"b", b"c"]


def test_what_was_never_there_is_unknown() -> None:
    kept = store()
    fails(TurnUnknown, lambda: fetched(kept, refs("a"), run_id=None))
    fails(TurnUnknown, lambda: by_session(kept))
    kept.put(turn("a"))
    fails(TurnUnknown, lambda: fetched(kept, refs("a", choice=1), run_id=None), "no choice 1")


def test_a_turn_of_another_run_is_refused_by_name() -> None:
    kept = store()
    kept.put(turn("a"))
    kept.put(turn("b", run=None))
    for call in (
        lambda: fetched(kept, refs("a"), run_id=RunId("run-2")),
        lambda: by_session(kept, run="run-2"),
    ):
        fails(TurnOfOtherRun, call, "run run-1, not run-2")
    assert fetched(kept, refs("b"), run_id=RunId("run-2")) == [b"b"], "nobody knows its run"


def test_a_running_turn_is_no_unknown_one() -> None:
    kept = store()
    with kept.running(RequestId("a"), S), kept.running(RequestId("a"), None):
        fails(TurnRunning, lambda: fetched(kept, refs("a"), run_id=None))
        fails(TurnRunning, lambda: by_session(kept))
    fails(TurnUnknown, lambda: fetched(kept, refs("a"), run_id=None))
    kept.put(turn("b"))
    with kept.running(RequestId("c"), S):
        assert fetched(kept, refs("b"), run_id=None) == [b"b"]
        problem = fails(TurnRunning, lambda: by_session(kept))
        assert problem.session_id == "s1"
    assert by_session(kept) == [b"b"]


def test_the_same_request_again_stands_in_for_a_lost_answer() -> None:
    kept = store()
    kept.put(turn("a", prompt=7, choices={0: b"first"}))
    kept.put(turn("b", prompt=8))
    kept.put(turn("a", prompt=7, choices={0: b"second"}))
    assert by_session(kept) == [b"b", b"second"]
    assert kept.size_bytes == len(b"second") + 1


@pytest.mark.parametrize(
    "other", [{"prompt": 1}, {"session": None}, {"run": "run-2"}], ids=["prompt", "session", "run"]
)
def test_an_id_of_two_requests_means_neither(other: dict[str, Any]) -> None:
    kept = store()
    kept.put(turn("a"))
    for _ in range(2):
        kept.put(turn("a", **other))
        fails(TurnAmbiguous, lambda: fetched(kept, refs("a"), run_id=None))
        fails(TurnAmbiguous, lambda: by_session(kept))
    assert (len(kept), kept.size_bytes) == (0, 0)


def test_a_turn_without_log_probabilities_trains_nothing() -> None:
    kept = store()
    kept.put(turn("a", choices={0: b"x", 1: None}))
    assert fetched(kept, refs("a"), run_id=None) == [b"x"]
    fails(TurnIncomplete, lambda: fetched(kept, refs("a", choice=1), run_id=None))


def test_released_turns_go_choice_by_choice() -> None:
    kept = store()
    kept.put(turn("a", choices={0: b"xx", 1: b"yyy"}))
    kept.put(turn("b"))
    assert kept.release(refs("a", "nobody")) == 1
    assert kept.release(refs("a")) == 0, "again is nothing new"
    assert fetched(kept, refs("a", choice=1), run_id=None) == [b"yyy"]
    fails(TurnUnknown, lambda: fetched(kept, refs("a"), run_id=None), "released")
    assert kept.size_bytes == 4
    assert kept.release(refs("a", choice=1)) == 1
    fails(TurnGone, lambda: fetched(kept, refs("a"), run_id=None), "handed in")
    assert kept.release_session(S, choice=0) == 1
    assert kept.release_session(S, choice=0) == 0
    assert (len(kept), kept.size_bytes) == (0, 0)
    fails(TurnGone, lambda: by_session(kept), "handed in")


def test_a_discarded_session_takes_its_turns_with_it() -> None:
    kept = store()
    kept.put(turn("a"))
    kept.put(turn("b", session=None))
    kept.discard_session(S)
    kept.discard_session(SessionId("nobody"))
    fails(TurnGone, lambda: fetched(kept, refs("a"), run_id=None), "discarded")
    fails(TurnGone, lambda: by_session(kept), "discarded")
    assert fetched(kept, refs("b"), run_id=None) == [b"b"]


def test_what_is_remembered_of_gone_turns_is_bounded_too() -> None:
    kept = store(turns_max=3)
    for number in range(100):
        kept.put(turn(f"t{number}", session=SessionId(f"s{number}")))
    fails(TurnUnknown, lambda: fetched(kept, refs("t0"), run_id=None))
    fails(TurnGone, lambda: fetched(kept, refs("t96"), run_id=None))
    assert len(kept._gone) <= 3
    assert len(kept._sessions) <= 7


def test_nothing_is_kept_when_it_is_off() -> None:
    kept = store(turns_max=0)
    kept.put(turn("a"))
    assert (kept.is_on, len(kept)) == (False, 0)
