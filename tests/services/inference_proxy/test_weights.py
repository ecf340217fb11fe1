"""Weight updates of all engines: the version advances once, who fails is out, nobody is guessed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.inference_proxy.siblings import Alone
from services.inference_proxy.workers.errors import WorkerSilent
from tests.services.inference_proxy.harness import Running, pair, request_body, running
from tests.services.inference_proxy.stub import StubEngine

PATH = "/v1/admin/weights"
FOLDER = {"policy_version": 1, "weights_path": "/mnt/run/weights/v1"}
STEPS = [
    ("/pause?mode=wait", None),
    (
        "/collective_rpc",
        {"method": "reload_weights", "kwargs": {"weights_path": "/mnt/run/weights/v1"}},
    ),
    ("/reset_prefix_cache?reset_running_requests=true", None),
    ("/update_weight_version", {"new_version": "1"}),
    ("/resume", None),
]


async def views(proxy: Running) -> dict[str, dict[str, Any]]:
    body = (await proxy.http.get("/v1/engines")).json()
    return {view["name"]: view for view in body["engines"]}


@pytest.mark.parametrize("has_sockets", [False, True])
async def test_every_engine_goes_through_every_step_and_the_version_advances(
    has_sockets: bool,
) -> None:
    engines = pair()
    async with running(engines, has_sockets=has_sockets) as proxy:
        report = (await proxy.http.post(PATH, json=FOLDER)).json()
        assert report["applied"] == 1
        assert sorted(report["updated"]) == sorted(engines)
        assert (report["failed"], report["left_out"]) == ({}, [])
        assert all(engine.admin_calls == STEPS for engine in engines.values())
        assert (await proxy.http.get("/v1/policy-version")).json()["applied"] == 1


async def test_the_engines_own_transfer_is_begun_and_finished() -> None:
    engine = StubEngine()
    async with running({"e0": engine}) as proxy:
        body = {"policy_version": 1, "update_info": {"names": ["a"]}, "running": "keep"}
        assert (await proxy.http.post(PATH, json=body)).status_code == 200
    assert engine.admin_calls[:4] == [
        ("/pause?mode=keep", None),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"names": ["a"]}}),
        ("/finish_weight_update", {}),
    ]


@pytest.mark.parametrize("broken", ["/pause", "/collective_rpc", "/update_weight_version"])
async def test_an_engine_that_fails_is_out_and_said_and_what_runs_there_is_ended(
    broken: str,
) -> None:
    engines = {"e0": StubEngine(), "e1": StubEngine(broken_paths={broken})}
    async with running(engines) as proxy:
        report = (await proxy.http.post(PATH, json=FOLDER)).json()
        assert (report["updated"], report["applied"]) == (["e0"], 1)
        assert broken in report["failed"]["e1"]
        view = (await views(proxy))["e1"]
        assert not view["is_serving"]
        assert "weight update to v1 failed" in view["why_out"]
        assert view["policy_version"] == 0
        assert engines["e1"].admin_calls[-1] == ("/pause?mode=abort", None)
        assert ("/resume", None) not in engines["e1"].admin_calls
        assert (await proxy.generate(request_body([1, 2, 3]))).status_code == 200


async def test_a_prefix_cache_of_the_old_weights_is_a_failure_whatever_its_status() -> None:
    engines = {"e0": StubEngine(), "e1": StubEngine(keeps_cache=True)}
    async with running(engines) as proxy:
        report = (await proxy.http.post(PATH, json=FOLDER)).json()
        assert "/reset_prefix_cache" in report["failed"]["e1"]


async def test_an_engine_that_does_not_resume_is_out() -> None:
    engines = {"e0": StubEngine(), "e1": StubEngine(broken_paths={"/resume"})}
    async with running(engines) as proxy:
        report = (await proxy.http.post(PATH, json=FOLDER)).json()
        assert report["updated"] == ["e0"]
        assert "did not resume" in (await views(proxy))["e1"]["why_out"]


@pytest.mark.parametrize(("silent_times", "status"), [(1, 200), (2, 200), (99, 503)])
async def test_no_engine_stays_paused_because_another_worker_is_silent(
    silent_times: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    silences = iter(range(silent_times))

    async def publish(_: Alone) -> None:
        if next(silences, None) is not None:
            raise WorkerSilent(1, "did not answer")

    monkeypatch.setattr(Alone, "publish", publish)
    engines = {"e0": StubEngine(), "e1": StubEngine(broken_paths={"/collective_rpc"})}
    async with running(engines) as proxy:
        assert (await proxy.http.post(PATH, json=FOLDER)).status_code == status
        assert engines["e0"].admin_calls == STEPS
        assert engines["e1"].admin_calls[-1] == ("/pause?mode=abort", None)
        assert (await proxy.generate(request_body([1, 2, 3]))).status_code == 200


async def test_no_engine_left_is_a_502_and_the_version_stays() -> None:
    async with running({"e0": StubEngine(broken_paths={"/collective_rpc"})}) as proxy:
        reply = await proxy.http.post(PATH, json=FOLDER)
        assert (reply.status_code, reply.json()["code"]) == (502, "upstream_failed")
        assert "e0" in reply.json()["detail"]
        assert (await proxy.http.get("/v1/policy-version")).json()["applied"] == 0


async def test_an_engine_that_does_not_serve_is_left_out_and_stays_behind() -> None:
    engines = {"e0": StubEngine(), "e1": StubEngine()}
    async with running(engines) as proxy:
        await proxy.http.post("/v1/engines/e1/eject")
        report = (await proxy.http.post(PATH, json=FOLDER)).json()
        assert (report["updated"], report["left_out"]) == (["e0"], ["e1"])
        assert engines["e1"].admin_calls == []


async def test_an_older_version_touches_no_engine() -> None:
    engine = StubEngine()
    async with running({"e0": engine}, policy_version=5) as proxy:
        reply = await proxy.http.post(PATH, json=FOLDER)
        assert (reply.status_code, reply.json()["code"]) == (409, "policy_version_conflict")
    assert engine.admin_calls == []


async def test_older_weights_on_purpose_take_out_who_did_not_get_them() -> None:
    engines = {"e0": StubEngine(), "e1": StubEngine()}
    async with running(engines, policy_version=5) as proxy:
        await proxy.http.post("/v1/engines/e1/eject")
        report = (await proxy.http.post(PATH, json={**FOLDER, "force": True})).json()
        assert (report["applied"], report["updated"], report["left_out"]) == (1, ["e0"], ["e1"])
        view = (await views(proxy))["e1"]
        assert not view["is_serving"]
        assert "has v5, given up for v1" in view["why_out"]


@pytest.mark.parametrize(
    "body",
    [
        {"policy_version": 1},
        {**FOLDER, "update_info": {}},
        {**FOLDER, "running": "whatever"},
        {**FOLDER, "policy_version": -1},
    ],
)
async def test_a_body_that_names_no_source_or_two_is_refused(body: dict[str, Any]) -> None:
    engine = StubEngine()
    async with running({"e0": engine}) as proxy:
        assert (await proxy.http.post(PATH, json=body)).status_code == 422
    assert engine.admin_calls == []


async def test_one_update_at_a_time() -> None:
    async with running({"e0": StubEngine()}) as proxy:
        both = await asyncio.gather(
            proxy.http.post(PATH, json=FOLDER),
            proxy.http.post(PATH, json={**FOLDER, "policy_version": 2}),
        )
        assert sorted(reply.status_code for reply in both) == [200, 409]


async def test_a_session_keeps_its_version_over_an_update(tmp_path: Path) -> None:
    async with running({"e0": StubEngine()}, root=tmp_path / "root") as proxy:
        first = await proxy.generate(request_body([1, 2, 3]), session="s")
        assert (await proxy.http.post(PATH, json=FOLDER)).status_code == 200
        second = await proxy.generate(request_body([1, 2, 3, 4]), session="s")
        fresh = await proxy.generate(request_body([1, 2, 3]), session="t")
    found = [reply.headers["X-Sideband-Policy-Version"] for reply in (first, second, fresh)]
    assert found == ["0", "0", "1"]
