"""What follows from the word for an engine's process: the rules alone."""

from typing import Any

import pytest

from services.inference_proxy.admission import Gate
from services.inference_proxy.identity import EngineIdentity, Said, Weights, weights_of
from services.inference_proxy.sampled import check_weights
from services.inference_proxy.upstream import EngineBehind
from services.inference_proxy.workers.state import FollowingBook, adopt, restore, state_of
from tests.services.inference_proxy.test_doubts import leader_and_follower, said
from tests.services.inference_proxy.test_sampled import engine_of, named

KNOWN = Weights(policy_version=3, is_reported=True, process="a")


def says(version: int | None = None, process: str | None = None, *, route: bool = True) -> Said:
    identity = EngineIdentity(is_by_handle=True, policy_version=version) if route else None
    return Said(identity=identity, process=process)


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (says(process="a"), KNOWN),
        (says(process="b"), Weights(policy_version=1, process="b")),
        (says(), Weights(policy_version=1)),
        (says(5, "a"), Weights(policy_version=5, is_named=True, process="a")),
        (says(5, "b"), Weights(policy_version=5, is_named=True, process="b")),
        (says(process="a", route=False), KNOWN),
        (says(process="b", route=False), Weights(policy_version=1, process="b")),
        (says(route=False), Weights(policy_version=1)),
    ],
)
def test_what_an_engine_runs_follows_from_its_process(told: Said, found: Weights) -> None:
    assert weights_of(told, KNOWN, at_start=1) == found


def test_the_first_sign_of_a_process_is_that_of_what_is_known() -> None:
    reported = Weights(policy_version=3, is_reported=True)
    assert weights_of(says(process="a"), reported, at_start=1) == KNOWN
    on_record = Weights(policy_version=3)
    bound = Weights(policy_version=3, process="a")
    assert weights_of(says(process="a", route=False), on_record, at_start=1) == bound


def test_an_engine_that_had_the_route_and_has_it_no_more_was_started_anew() -> None:
    named_ones = Weights(policy_version=3, is_named=True)
    other = says(route=False)
    found = weights_of(other, named_ones, at_start=1, had_route=True)
    assert found == Weights(policy_version=1)
    assert weights_of(other, named_ones, at_start=1, had_route=False) == named_ones


def test_the_process_that_was_reported_may_have_come_without_the_route() -> None:
    """It was started anew without the plugin, unseen, and then brought up to date."""
    assert weights_of(says(process="a", route=False), KNOWN, at_start=1, had_route=True) == KNOWN


@pytest.mark.parametrize(
    ("names", "process", "at_least", "is_shown"),
    [
        ([], "a", 3, True),
        ([], None, 3, False),
        (["default"], None, 3, False),  # reported, and never named: it says nothing
        (["default"], "a", 3, True),
        (["3"], "b", 3, True),  # started anew with weights that it names
        ([], "b", 1, True),  # no older than those of the start
        ([], "b", 3, None),
        (["default"], "b", 3, None),
        (["2"], "a", 3, None),
    ],
)
def test_names_and_process_decide_together(
    names: list[str], process: str | None, at_least: int, is_shown: bool | None
) -> None:
    book, engine = engine_of(at_start=1)
    book.report(3)
    asked: dict[str, Any] = {"at_least": at_least, "known": KNOWN, "process": process}
    if is_shown is not None:
        assert check_weights(engine, named(*names), **asked) is is_shown
        return
    with pytest.raises(EngineBehind):
        check_weights(engine, named(*names), **asked)


def test_another_process_with_weights_that_are_new_enough_is_asked_who_it_is() -> None:
    book, engine = engine_of()
    book.told(engine, says(process="a"), run_id=None, known=engine.weights, doubts=0)
    book.probed(engine, now_s=0.0)
    assert not engine.is_doubted
    assert check_weights(engine, [], at_least=0, known=engine.weights, process="b")
    assert engine.is_doubted


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_mute_engine_where_nobody_listened_has_the_weights_of_its_start(is_dead: bool) -> None:
    book, engine = engine_of()
    book.begin_at(3)
    book.failed(engine, "refused", now_s=0.0, is_dead=True, is_probe=True)  # it starts yet
    book.probed(engine, now_s=0.0)
    assert book.is_serving(engine)
    for _ in range(3):
        book.failed(engine, "refused", now_s=0.0, is_dead=is_dead)
    book.probed(engine, now_s=0.0)
    assert engine.health.state == "healthy"
    assert (book.is_serving(engine), engine.policy_version) == (not is_dead, 0 if is_dead else 3)
    book.report(3)
    assert book.is_serving(engine)


@pytest.mark.parametrize(
    "known", [Weights(policy_version=3, is_named=True), KNOWN], ids=["named", "process"]
)
def test_an_engine_that_can_say_what_it_runs_is_asked_instead(known: Weights) -> None:
    book, engine = engine_of()
    book.probed(engine, now_s=0.0)
    engine.weights = known
    book.failed(engine, "refused", now_s=0.0, is_dead=True)
    assert engine.weights == known
    assert engine.is_doubted


def test_the_process_that_has_the_weights_is_known_in_all_workers() -> None:
    leader, follower = leader_and_follower()
    engine = leader.get("e0")
    leader.told(engine, says(process="a"), run_id=None, known=engine.weights, doubts=0)
    leader.report(3, ["e0"], processes={"e0": "b"})
    new = leader_and_follower()[1]
    adopt(said(leader, 1), follower, Gate())
    restore(state_of(leader, Gate(), is_settled=True, number=1), new, Gate())
    for book in (leader, follower, new):
        assert book.get("e0").weights == Weights(policy_version=3, is_reported=True, process="b")
    assert isinstance(follower, FollowingBook)
