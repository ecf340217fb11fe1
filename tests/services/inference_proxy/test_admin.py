"""Admin routes: versions and their push, the gate, engines."""

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response

from tests.services.inference_proxy.harness import (
    pair,
    request_body,
    running,
    served,
    until,
)
from tests.services.inference_proxy.stub import StubEngine

PROMPT = [1, 2, 3]


async def report(http: httpx.AsyncClient, version: int, **members: Any) -> httpx.Response:
    return await http.post("/v1/policy-version", json={"policy_version": version, **members})


async def test_the_applied_version_is_the_least_of_those_that_serve() -> None:
    async with running({"e0": StubEngine(), "e1": StubEngine()}) as proxy:
        answer = await report(proxy.http, 3, engines=["e0"])
        assert answer.json()["applied"] == 0
        assert answer.json()["engines"] == {"e0": 3, "e1": 0}
        assert (await report(proxy.http, 3, engines=["e1"])).json()["applied"] == 3


async def test_an_engine_that_is_out_does_not_hold_the_version_back_nor_bring_it_down() -> None:
    async with running({"e0": StubEngine(), "e1": StubEngine()}) as proxy:
        await report(proxy.http, 1)
        await proxy.http.post("/v1/engines/e1/eject")
        assert (await report(proxy.http, 2, engines=["e0"])).json()["applied"] == 2
        back = (await proxy.http.post("/v1/engines/e1/return")).json()
        assert (back["state"], back["is_serving"]) == ("healthy", False)
        assert back["why_out"] == "stale weights: v1 is behind v2"
        await report(proxy.http, 2, engines=["e1"])
        engines = (await proxy.http.get("/v1/engines")).json()["engines"]
        assert [engine["is_serving"] for engine in engines] == [True, True]


async def test_a_version_goes_back_only_by_force() -> None:
    async with running({"e0": StubEngine()}) as proxy:
        await report(proxy.http, 7)
        refused = await report(proxy.http, 4)
        assert (refused.status_code, refused.json()["code"]) == (409, "policy_version_conflict")
        assert (await proxy.http.get("/v1/policy-version")).json()["applied"] == 7
        assert (await report(proxy.http, 4, force=True)).json()["applied"] == 4


async def test_bad_reports_change_nothing() -> None:
    async with running({"e0": StubEngine(), "e1": StubEngine()}) as proxy:
        unknown = await report(proxy.http, 2, engines=["e0", "nobody"])
        assert (unknown.status_code, unknown.json()["code"]) == (404, "unknown_engine")
        for body in ({}, {"policy_version": -1}, {"policy_version": "2"}, {"version": 2}):
            answer = await proxy.http.post("/v1/policy-version", json=body)
            assert answer.status_code == 422
        engines = (await proxy.http.get("/v1/policy-version")).json()["engines"]
        assert engines == {"e0": 0, "e1": 0}


async def test_a_version_is_pushed_until_the_orchestrator_has_it() -> None:
    orchestrator, taken, failures = FastAPI(), [], [503, 500]

    @orchestrator.get("/v1/policy-version")
    async def tell() -> dict[str, int | None]:
        return {"policy_version": None}

    @orchestrator.put("/v1/policy-version")
    async def take(request: Request) -> Response:
        if failures:
            return Response(status_code=failures.pop())
        taken.append((await request.json(), request.headers.get("authorization")))
        return Response(status_code=204)

    async with (
        served(orchestrator) as url,
        running(
            {"e0": StubEngine()},
            has_sockets=True,
            orchestrator_url=url,
            orchestrator_token="a-token-of-the-tests",
        ) as proxy,
    ):
        await until(lambda: taken == [({"policy_version": 0}, "Bearer a-token-of-the-tests")])
        failures.append(503)
        await report(proxy.http, 1)
        await until(lambda: proxy.parts.pusher.pushed == 1)
        assert taken[1][0] == {"policy_version": 1}
        shown = (await proxy.http.get("/v1/policy-version")).json()
        assert (shown["pushed"], shown["push_failures"]) == (1, 0)


async def test_pause_refuses_new_requests_and_lets_running_ones_end() -> None:
    engine = StubEngine(hold=asyncio.Event())
    async with running({"e0": engine}) as proxy:
        running_one = asyncio.create_task(proxy.generate(request_body(PROMPT)))
        await engine.arrived.wait()
        paused = (await proxy.http.post("/v1/admin/pause")).json()
        assert (paused["state"], paused["in_flight"]) == ("paused", 1)
        refused = await proxy.generate(request_body(PROMPT))
        assert (refused.status_code, refused.json()["code"]) == (503, "not_admitted")
        assert (await proxy.http.get("/readyz")).json()["reasons"] == ["the proxy is paused"]
        assert engine.hold is not None
        engine.hold.set()
        assert (await running_one).status_code == 200
        await proxy.http.post("/v1/admin/resume")
        assert (await proxy.generate(request_body(PROMPT))).status_code == 200


async def test_a_drain_ends_when_all_is_done_or_at_its_deadline() -> None:
    engine = StubEngine(hold=asyncio.Event())
    async with running({"e0": engine}) as proxy:
        last = asyncio.create_task(proxy.generate(request_body(PROMPT)))
        await engine.arrived.wait()
        late = (await proxy.http.post("/v1/admin/drain?timeout_s=0.05")).json()
        assert (late["state"], late["is_complete"], late["in_flight"]) == ("draining", False, 1)
        assert engine.hold is not None
        engine.hold.set()
        done = (await proxy.http.post("/v1/admin/drain?timeout_s=5")).json()
        assert (done["state"], done["is_complete"]) == ("drained", True)
        assert (await last).status_code == 200
        assert (await proxy.http.post("/v1/openai", json={})).status_code == 404


async def test_unknown_engines_are_404() -> None:
    async with running({"e0": StubEngine()}) as proxy:
        for action in ("eject", "return"):
            answer = await proxy.http.post(f"/v1/engines/e9/{action}")
            assert (answer.status_code, answer.json()["code"]) == (404, "unknown_engine")


async def test_readiness_wants_both_roles_of_a_pair() -> None:
    async with running(pair()) as proxy:
        assert (await proxy.http.get("/readyz")).status_code == 200
        await proxy.http.post("/v1/engines/d0/eject")
        assert (await proxy.http.get("/readyz")).json()["reasons"] == ["no decode engine serves"]


async def test_metrics_tell_what_happened() -> None:
    async with running({"e0": StubEngine()}) as proxy:
        await proxy.generate(request_body(PROMPT), session="s1")
        text = (await proxy.http.get("/metrics")).text
        assert 'proxy_generate_total{kind="train",outcome="ok"} 1.0' in text
        assert 'proxy_answers_total{form="inline",kind="train"} 1.0' in text
        assert 'proxy_engine_serving{engine="e0"} 1.0' in text
        assert "proxy_sessions 1.0" in text
