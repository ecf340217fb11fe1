"""Answers of weights older than their request: an engine that died between two probes."""

from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from fastapi import Response

from services.inference_proxy.dialects.vllm import make
from services.inference_proxy.engine import Engine
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.health import Health, HealthLimits
from services.inference_proxy.identity import EngineIdentity, Said, Weights
from services.inference_proxy.sampled import check_weights
from services.inference_proxy.upstream import EngineBehind
from services.inference_proxy.workers.state import FollowingBook
from tests.services.inference_proxy.harness import (
    GENERATE,
    TRAIN,
    Running,
    request_body,
    running,
    until,
)
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.test_streams import events_of

PROMPT = [5, 17, 3, 42]
KNOWN = Weights(policy_version=3)
OLDER = Weights(policy_version=0, is_named=True)
LIMITS = HealthLimits(failures_max=3, returns_min=1, backoff_s=0.0, backoff_s_max=0.0)


class NamingEngine(StubEngine):
    """Names the weights of its tokens, as vLLM 0.32 does."""

    name_of_weights = "3"

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super().generate(body)
        for choice in answer["choices"]:
            span = {"version": self.name_of_weights, "start": 0, "end": len(choice["token_ids"])}
            choice["weight_versions"] = [span]
        return answer

    def told(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super().told(body)
        for choice in answer["choices"]:
            span = {"version": self.name_of_weights, "start": 0, "end": len(choice["token_ids"])}
            choice["weight_versions"] = [span]
        return answer


async def report(proxy: Running, version: int, **members: Any) -> httpx.Response:
    body = {"policy_version": version, **members}
    return await proxy.http.post("/v1/policy-version", json=body)


async def view_of(proxy: Running, name: str) -> dict[str, Any]:
    views = (await proxy.http.get("/v1/engines")).json()["engines"]
    return next(view for view in views if view["name"] == name)


async def test_an_engine_that_died_between_two_probes_answers_no_train_request(
    tmp_path: Path,
) -> None:
    died, other = NamingEngine(), NamingEngine()
    async with running({"e0": died, "e1": other}, root=tmp_path / "root") as proxy:
        await report(proxy, 3)
        died.name_of_weights = "0"  # every probe is answered, before and after
        answers = [(await proxy.generate(request_body(PROMPT))).json() for _ in range(6)]
        named = {a["choices"][0]["weight_versions"][0]["version"] for a in answers}
        assert (len(answers), named, len(died.requests)) == (6, {"3"}, 1)
        view = await view_of(proxy, "e0")
        assert (view["policy_version"], view["is_serving"]) == (0, False)
        assert view["why_out"] == "stale weights: v0 is behind v3"
        assert (await proxy.http.get("/v1/policy-version")).json()["applied"] == 3
        await until(lambda: len(proxy.files()) == 6)  # the losing attempt's is gone
        died.name_of_weights = "3"
        await report(proxy, 3, engines=["e0"])
        assert (await view_of(proxy, "e0"))["is_serving"]


@pytest.mark.parametrize("leg", ["p0", "d0"])
async def test_either_leg_of_a_pair_is_looked_at(tmp_path: Path, leg: str) -> None:
    engines = {"p0": NamingEngine("prefill"), "d0": NamingEngine("decode")}
    async with running({**engines}, root=tmp_path / "root") as proxy:
        await report(proxy, 3)
        assert (await proxy.generate(request_body(PROMPT))).status_code == 200
        engines[leg].name_of_weights = "2"
        refused = await proxy.generate(request_body(PROMPT))
        assert (refused.status_code, refused.json()["code"]) == (503, "no_engine")
        assert (await view_of(proxy, leg))["why_out"] == "stale weights: v2 is behind v3"


async def test_a_stream_of_older_weights_breaks_and_leaves_nothing(tmp_path: Path) -> None:
    engine = NamingEngine()
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        await report(proxy, 3)
        engine.name_of_weights = "0"
        answer = await proxy.generate({**request_body(PROMPT), "stream": True})
        said = events_of(answer.text)[-1]["error"]["message"]
        assert said == "engine e0: v0 sampled the answer to a request of v3"
        await until(lambda: not proxy.files())
        assert not (await view_of(proxy, "e0"))["is_serving"]


async def test_an_engine_behind_is_known_by_an_event_that_has_no_end(tmp_path: Path) -> None:
    engine = NamingEngine()
    choice = {"index": 0, "token_ids": [1], "finish_reason": "stop", **named("0")[0]}
    event = b"data: " + orjson.dumps({"choices": [choice]})
    engine.script.append(lambda _: Response(event, media_type="text/event-stream"))
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        await report(proxy, 3)
        await proxy.generate({**request_body(PROMPT), "stream": True})
        assert (await view_of(proxy, "e0"))["why_out"] == "stale weights: v0 is behind v3"


@pytest.mark.parametrize("spills", [False, True])
async def test_an_openai_turn_of_older_weights_is_not_kept(tmp_path: Path, spills: bool) -> None:
    engine = NamingEngine(spills=spills)
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        await report(proxy, 3)
        body = {"model": "m", "prompt": "Hello", "max_tokens": 4}
        good = await proxy.http.post("/v1/completions", json=body, headers=TRAIN)
        engine.name_of_weights = "0"
        bad = await proxy.http.post("/v1/completions", json=body, headers=TRAIN)
        assert (good.status_code, bad.status_code, len(proxy.parts.keeper.turns)) == (200, 503, 1)


async def test_what_nobody_trains_on_is_answered_all_the_same() -> None:
    engine = NamingEngine()
    async with running({"e0": engine}) as proxy:
        await report(proxy, 3)
        engine.name_of_weights = "0"
        assert (await proxy.http.post(GENERATE, json=request_body(PROMPT))).status_code == 200
        assert (await view_of(proxy, "e0"))["is_serving"]


async def test_requests_of_before_go_on_once_the_engines_went_back() -> None:
    engine = NamingEngine()
    async with running({"e0": engine}) as proxy:
        await report(proxy, 3)
        await proxy.generate(request_body(PROMPT), session="s1")
        engine.name_of_weights = "1"
        await report(proxy, 1, force=True)
        assert (await proxy.generate(request_body(PROMPT), session="s1")).status_code == 200


async def test_an_engine_that_failed_is_asked_again_who_it_is() -> None:
    identity = {"is_by_handle": True, "run_id": None, "policy_version": 3}
    engines = {name: StubEngine(identity=dict(identity)) for name in ("e0", "e1")}
    async with running(engines) as proxy:
        for engine in engines.values():
            engine.identity = identity | {"policy_version": None}
            engine.script.append(lambda _: StubEngine.json({}, 500))
        await proxy.generate(request_body(PROMPT))
        await until(lambda: all(e.policy_version == 0 for e in proxy.parts.book))


def engine_of(*, at_start: int = 0) -> tuple[EngineBook, Engine]:
    engine = Engine(
        name="e0",
        url="http://e0",
        role="colocated",
        payload_mount=None,
        health=Health(limits=LIMITS),
        dialect=make(None),
    )
    return EngineBook([engine], policy_version=at_start), engine


def named(*names: object) -> list[dict[str, Any]]:
    spans = [{"version": name, "start": at, "end": at + 1} for at, name in enumerate(names)]
    return [{"weight_versions": spans}]


@pytest.mark.parametrize(
    ("names", "names_weights", "found"),
    [
        (["3"], False, None),
        (["4", "3"], False, None),
        ([3, 2], False, 2),
        (["4", "2", "1"], False, 2),
        (["default"], False, None),
        (["default"], True, 1),
        (["3", "default"], False, 1),  # it does name them
        (["9" * 5000], True, 1),
        ([None], False, None),
    ],
)
def test_the_oldest_weights_decide(
    names: list[object], names_weights: bool, found: int | None
) -> None:
    book, engine = engine_of(at_start=1)
    book.report(3)
    engine.names_weights = names_weights
    if found is None:
        check_weights(engine, named(*names), at_least=3, known=KNOWN)
        return
    with pytest.raises(EngineBehind) as raised:
        check_weights(engine, named(*names), at_least=3, known=KNOWN)
    assert (raised.value.weights.policy_version, raised.value.expected) == (found, 3)


@pytest.mark.parametrize("choices", [None, 3, [None], [{}], [{"weight_versions": [1, None]}]])
def test_an_answer_that_names_nothing_says_nothing(choices: object) -> None:
    check_weights(engine_of()[1], choices, at_least=3, known=KNOWN)


def test_weights_known_from_before_this_proxy_began_are_not_those_of_another_name() -> None:
    book, engine = engine_of()
    book.begin_at(3)  # proxy and engine were started anew together; nobody reported since
    assert engine.policy_version == 3
    with pytest.raises(EngineBehind):
        check_weights(engine, named("default"), at_least=3, known=KNOWN)
    check_weights(engine, named("default"), at_least=0, known=KNOWN)
    check_weights(engine, [{"weight_versions": []}], at_least=3, known=KNOWN)


@pytest.mark.parametrize("ends", [{}, {"start": None, "end": None}, {"start": "0", "end": "0"}])
def test_a_span_of_which_nobody_knows_the_tokens_is_taken_to_have_some(ends: Any) -> None:
    with pytest.raises(EngineBehind):
        check_weights(
            engine_of()[1],
            [{"weight_versions": [{"version": "2", **ends}]}],
            at_least=3,
            known=KNOWN,
        )


def test_weights_of_no_token_say_nothing() -> None:
    spans = [{"version": "0", "start": 0, "end": 0}, {"version": "3", "start": 0, "end": 4}]
    check_weights(engine_of()[1], [{"weight_versions": spans}], at_least=3, known=KNOWN)


def test_what_was_said_since_is_newer_than_the_answer() -> None:
    book, engine = engine_of()
    book.report(3)
    known = engine.weights
    book.report(3)  # it was started anew and brought to v3 meanwhile
    book.behind(engine, OLDER, known=known)
    assert engine.policy_version == 3
    book.behind(engine, OLDER, known=engine.weights)
    assert engine.weights == OLDER


def test_what_was_said_while_an_engine_was_asked_is_newer_than_its_answer() -> None:
    book, engine = engine_of()
    book.report(3)
    known = engine.weights
    book.report(4)
    told = EngineIdentity(is_by_handle=True, policy_version=3)
    book.told(engine, Said(identity=told), run_id=None, known=known, doubts=0)
    assert engine.policy_version == 4


def test_a_request_of_a_version_that_nobody_applied_is_refused_until_engines_go_back() -> None:
    book, engine = engine_of()
    book.probed(engine, now_s=0.0)
    assert book.least(5) == 5
    book.report(5)
    book.report(3, force=True)
    assert (book.least(5), book.least(2)) == (3, 2)


def test_a_follower_sees_that_engines_went_back() -> None:
    book = FollowingBook([engine_of()[1]])
    book.follow(5)
    assert book.least(7) == 7
    book.follow(3)
    assert book.least(5) == 3
