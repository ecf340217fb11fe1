"""What is known of an engine, when words about it cross: none of them may hide an older one."""

import asyncio
from pathlib import Path

import pytest

from services.inference_proxy.admission import Gate
from services.inference_proxy.engine import Engine
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.identity import EngineIdentity, Said, Weights
from services.inference_proxy.workers.state import (
    FollowingBook,
    SharedState,
    adopt,
    restore,
    state_of,
)
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.test_sampled import engine_of
from tests.services.inference_proxy.test_worker_parts import book_of
from tests.services.inference_proxy.workers import PROMPT, session_of, turn, workers


def says(version: int | None) -> EngineIdentity:
    return EngineIdentity(is_by_handle=True, policy_version=version)


def asked(book: EngineBook, engine: Engine, version: int | None) -> None:
    """It is asked, and answers at once."""
    known, doubts = engine.weights, engine.doubts
    book.told(engine, Said(identity=says(version)), run_id=None, known=known, doubts=doubts)


def fit() -> tuple[EngineBook, Engine]:
    book, engine = engine_of()
    book.probed(engine, now_s=0.0)
    asked(book, engine, 0)
    assert not book.must_ask(engine, run_id=None)
    return book, engine


def test_what_fails_while_an_engine_is_asked_is_not_answered_by_it() -> None:
    book, engine = fit()
    book.failed(engine, "broke off", now_s=0.0)
    known, doubts = engine.weights, engine.doubts
    book.failed(engine, "broke off", now_s=0.0)  # its answer may be the last word of a dead process
    book.told(engine, Said(identity=says(3)), run_id=None, known=known, doubts=doubts)
    assert book.must_ask(engine, run_id=None)
    asked(book, engine, None)
    assert (engine.policy_version, engine.is_doubted) == (0, False)


def test_an_engine_whose_answer_crossed_a_report_is_asked_again() -> None:
    book, engine = fit()
    known, doubts = engine.weights, engine.doubts
    book.report(4)
    book.told(engine, Said(identity=says(3)), run_id=None, known=known, doubts=doubts)
    assert (engine.policy_version, book.must_ask(engine, run_id=None)) == (4, True)


def test_an_engine_whose_older_answer_crossed_a_report_is_asked_again() -> None:
    book, engine = fit()
    known = engine.weights
    book.report(4)
    book.behind(engine, Weights(policy_version=3, is_named=True), known=known)
    assert (engine.policy_version, book.must_ask(engine, run_id=None)) == (4, True)


def test_an_engine_that_named_its_weights_in_answers_and_names_none_was_started_anew() -> None:
    book, engine = fit()
    book.report(4)
    engine.weights, engine.names_weights = Weights(policy_version=4, is_reported=True), True
    asked(book, engine, None)
    assert engine.policy_version == 0


def leader_and_follower() -> tuple[EngineBook, FollowingBook]:
    leader, follower = book_of(EngineBook), book_of(FollowingBook)
    assert isinstance(follower, FollowingBook)
    return leader, follower


def said(leader: EngineBook, number: int, gate: Gate | None = None) -> SharedState:
    return state_of(leader, gate or Gate(), is_settled=True, number=number)


@pytest.mark.parametrize("reported", [False, True])
def test_other_news_do_not_undo_what_a_worker_alone_found(reported: bool) -> None:
    leader, follower = leader_and_follower()
    if reported:
        leader.report(3)
        adopt(said(leader, 1), follower, Gate())
    engine = follower.get("e0")
    asked(follower, engine, 2)  # after a failure that it alone saw
    found = engine.weights
    leader.hold("e1", "by hand")
    adopt(said(leader, 2), follower, Gate())
    assert engine.weights == found


def test_news_of_an_engines_weights_make_every_worker_ask_it() -> None:
    leader, follower = leader_and_follower()
    for engine in leader:
        asked(leader, engine, 2)
    adopt(said(leader, 1), follower, Gate())
    for engine in follower:
        asked(follower, engine, 2)
    leader.report(3, ["e0"])
    adopt(said(leader, 2), follower, Gate())
    for book in (leader, follower):
        assert [book.must_ask(engine, run_id=None) for engine in book] == [True, False]
        assert [engine.policy_version for engine in book] == [3, 2]


def test_an_engine_behind_is_asked_until_it_names_newer_weights() -> None:
    book, engine = fit()
    book.report(4)
    for named, serves in ((3, False), (3, False), (4, True)):  # it is named after the report
        assert book.must_ask(engine, run_id=None)
        asked(book, engine, named)
        assert book.is_serving(engine) == serves
    assert not book.must_ask(engine, run_id=None)


def test_a_report_to_an_engine_that_names_nothing_stands() -> None:
    book, engine = engine_of()
    book.probed(engine, now_s=0.0)
    asked(book, engine, None)
    book.report(4)
    asked(book, engine, None)
    assert (engine.policy_version, book.must_ask(engine, run_id=None)) == (4, False)


def test_an_engine_that_was_said_to_go_back_is_not_asked_whether_it_did() -> None:
    leader, follower = leader_and_follower()
    for number, (version, force) in enumerate([(5, False), (3, True)], 1):
        leader.report(version, force=force)
        adopt(said(leader, number), follower, Gate())
        for book in (leader, follower):
            for engine in book:
                assert book.must_ask(engine, run_id=None) != force
                asked(book, engine, version)
    assert (leader.applied, follower.applied) == (3, 3)


def test_an_engine_that_named_a_reported_version_shows_when_it_is_started_anew() -> None:
    book, engine = fit()
    book.report(4)
    asked(book, engine, 4)
    engine.weights = Weights(policy_version=4, is_reported=True)  # as another worker knows it
    book.failed(engine, "broke off", now_s=0.0)
    asked(book, engine, None)
    assert (engine.policy_version, book.is_serving(engine)) == (0, False)


def test_that_an_engine_names_its_weights_is_known_in_all_workers() -> None:
    leader, follower = leader_and_follower()
    leader.get("e0").names_weights = True
    adopt(said(leader, 1), follower, Gate())
    assert [engine.names_weights for engine in follower] == [True, False]


def test_an_engine_that_names_nothing_any_more_is_believed_once_it_was_returned() -> None:
    """It was replaced by an older server: else no report would bring it back."""
    leader, follower = leader_and_follower()
    for book in (leader, follower):
        asked(book, book.get("e0"), 2)

    def reported(number: int) -> list[int]:
        leader.report(3, ["e0"])
        adopt(said(leader, number), follower, Gate())
        for book in (leader, follower):
            asked(book, book.get("e0"), None)
        return [book.get("e0").policy_version for book in (leader, follower)]

    assert (reported(1), reported(2)) == ([0, 0], [0, 0])
    leader.release("e0")
    assert reported(3) == [3, 3]


def test_a_worker_that_begins_after_a_going_back_answers_requests_of_before() -> None:
    leader, _ = leader_and_follower()
    leader.report(5)
    leader.report(3, force=True)
    new = book_of(FollowingBook)
    restore(said(leader, 1), new, Gate())
    assert (leader.least(5), new.least(5)) == (3, 3)
    assert said(new, 1).has_gone_back


@pytest.mark.e2e
async def test_an_engine_that_one_worker_found_behind_is_behind_in_all(tmp_path: Path) -> None:
    def identity(version: int | None) -> dict[str, object]:
        return {"is_by_handle": True, "run_id": "run-1", "policy_version": version}

    engine = StubEngine(identity=identity(3))
    async with workers({"e0": engine}, tmp_path, ejection_failures=10**6) as proxy:
        engine.identity = identity(None)  # it was started anew: only worker 1 sees a request fail
        engine.script.append(lambda _: StubEngine.json({}, 500))
        await proxy.generate(turn(PROMPT, "r"), session=session_of(1))
        async with asyncio.timeout(15):
            versions: dict[str, int] = {}
            while versions != {"e0": 0}:
                versions = (await proxy.ask("GET", "/v1/policy-version")).json()["engines"]
