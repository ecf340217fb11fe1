"""Kept turns of several workers: what is given is what one worker would give, or nothing is."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_proxy.kept import KeptTurns
from services.inference_proxy.kept_turn import KeptTurn, TurnRef
from services.inference_proxy.prompts import Prompt
from services.inference_proxy.recording import EncodedChoice
from services.inference_proxy.turn_problems import TurnAmbiguous, TurnProblem
from services.inference_proxy.turn_source import OwnTurns
from services.inference_proxy.workers.asks import TurnWord
from services.inference_proxy.workers.places import worker_of
from services.inference_proxy.workers.turns import giver, words_of
from sideband.ids import RequestId, SessionId

ID = RequestId("r1")


def word(**members: Any) -> TurnWord:
    nothing: dict[str, Any] = {
        "kept_at_s": None,
        "identity": b"",
        "gone_at_s": None,
        "is_ambiguous": False,
        "is_running": False,
    }
    return TurnWord(**{**nothing, **members})


def kept(at_s: float, identity: bytes = b"a") -> TurnWord:
    return word(kept_at_s=at_s, identity=identity)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ([word(), word()], None),
        ([word(), kept(1)], 1),
        ([kept(2), kept(1)], 0),  # repeated: the later answer is the one that the client has
        ([kept(1), kept(2)], 1),
        ([kept(1), word(is_running=True)], 0),
        ([word(is_running=True), word(gone_at_s=1)], 0),
        ([word(gone_at_s=1), word(gone_at_s=2)], 1),
        ([word(gone_at_s=1), kept(2)], 1),  # one that had gone before this one came
    ],
)
def test_one_worker_gives_a_turn_or_knows_why_not(words: list[TurnWord], place: int | None) -> None:
    assert giver(words, ID) == place


@pytest.mark.parametrize(
    "words",
    [
        [kept(1, b"a"), kept(2, b"b")],
        [kept(1), word(gone_at_s=2)],  # both were kept at the same time
        [kept(2), word(gone_at_s=1, is_ambiguous=True)],
        [word(), word(gone_at_s=1, is_ambiguous=True)],
    ],
)
def test_an_id_of_two_requests_is_ambiguous(words: list[TurnWord]) -> None:
    for order in (words, words[::-1]):
        with pytest.raises(TurnAmbiguous):
            giver(order, ID)


@dataclass(frozen=True)
class Put:
    session: int | None
    worker: int  # where it arrives, if it has no session
    prompt: int
    size: int  # beyond 100 it is too large to be kept


@dataclass(frozen=True)
class Gone:
    """Released everywhere."""


@dataclass(frozen=True)
class Later:
    by_s: float


EVENTS = st.lists(
    st.builds(
        Put,
        session=st.sampled_from([None, 0, 1, 2]),
        worker=st.integers(0, 1),
        prompt=st.integers(0, 1),
        size=st.sampled_from([10, 10, 200]),
    )
    | st.builds(Gone)
    | st.builds(Later, by_s=st.sampled_from([1.0, 70.0])),
    max_size=6,
)


@given(EVENTS)
def test_several_workers_give_what_one_gives_or_say_that_it_is_ambiguous(events: list[Any]) -> None:
    now_s = 0.0

    def store() -> KeptTurns:
        return KeptTurns(turns_max=10, bytes_max=100, age_s_max=60, clock_s=lambda: now_s)

    alone, team = store(), [store(), store()]
    for number, event in enumerate(events):
        now_s += 0.001  # no two things happen at the same time
        if isinstance(event, Later):
            now_s += event.by_s
        elif isinstance(event, Gone):
            for each in (alone, *team):
                each.release([TurnRef(request_id=ID)])
        else:
            session = None if event.session is None else SessionId(f"s{event.session}")
            worker = event.worker if session is None else worker_of(session.encode(), 2)
            for each in (alone, team[worker]):
                content = b"%d" % number + b"x" * event.size
                each.put(
                    KeptTurn(
                        request_id=ID,
                        session_id=session,
                        run_id=None,
                        prompt=Prompt.of([event.prompt]),
                        choices={0: EncodedChoice((content,))},
                        at_s=now_s,
                    )
                )
    now_s += 0.001
    one = _found(alone)
    words = [words_of(OwnTurns(each), [ID])[0] for each in team]
    try:
        place = giver(words, ID)
    except TurnAmbiguous:
        return  # never another turn than one worker would give
    several = _found(team[0 if place is None else place])
    if one != several:
        # One worker calls ambiguous for good what two forget with the turns themselves.
        assert one == "TurnAmbiguous"
        assert several in {"TurnGone", "TurnUnknown"} or _is_the_last(events, several)


def _is_the_last(events: list[Any], content: str | bytes) -> bool:
    """Whether it is what was answered last under this id: what a client asks for."""
    last = max(number for number, event in enumerate(events) if isinstance(event, Put))
    return isinstance(content, bytes) and content.startswith(b"%dx" % last)


def _found(turns: KeptTurns) -> str | bytes:
    try:
        return b"".join(turns.find([TurnRef(request_id=ID)], run_id=None).encoded()[0])
    except TurnProblem as problem:
        return type(problem).__name__
