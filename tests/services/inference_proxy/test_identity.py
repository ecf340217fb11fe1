"""What engines say of themselves: who does not fit does not serve, and why is said by name."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import orjson
import pytest
from fastapi import FastAPI
from msgspec import structs
from structlog.testing import capture_logs

from services.inference_proxy.app import create_app
from services.inference_proxy.config import EngineSettings, ProxySettings
from services.inference_proxy.identity import (
    EngineIdentity,
    Expected,
    Misfit,
    Said,
    Weights,
    misfit_of,
    read_identity,
    weights_of,
)
from sideband.ids import RunId
from sideband.payload.root import PayloadRoot
from tests.services.inference_proxy.harness import (
    RUN,
    Running,
    request_body,
    running,
    served,
    until,
)
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import HF_CONFIG, MODEL
from tests.unit.engines.vllm.fakes import MODEL as PLUGIN_MODEL
from tests.unit.engines.vllm.fakes import script_for
from tests.unit.engines.vllm.running import RUN as PLUGIN_RUN
from tests.unit.engines.vllm.running import server

OTHER = structs.replace(MODEL, top_k=1)
FITS = EngineIdentity(is_by_handle=True, run_id=RUN, payload_model=MODEL)
EXPECTED = Expected(is_by_handle=True, run_id=RUN, model=MODEL, model_of="engine e0 serves")


def says(**changes: Any) -> dict[str, Any]:
    """The answer of the plugin's route."""
    told: dict[str, Any] = msgspec.to_builtins(structs.replace(FITS, **changes))
    return told


async def engine_view(proxy: Running, name: str) -> dict[str, Any]:
    views: list[dict[str, Any]] = (await proxy.http.get("/v1/engines")).json()["engines"]
    return next(view for view in views if view["name"] == name)


async def test_what_the_plugin_tells_is_what_the_proxy_reads(tmp_path: Path) -> None:
    state = server(tmp_path, script_for(5)).state
    shown = await state.shown(weight_version="3")
    assert state.process is not None
    assert read_identity(msgspec.json.encode(shown)) == EngineIdentity(
        is_by_handle=True,
        run_id=PLUGIN_RUN,
        payload_model=PLUGIN_MODEL,
        policy_version=3,
        engine_process=state.process,
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"is_by_handle": 1}',
        orjson.dumps(says(policy_version=-1)),
        orjson.dumps(says(policy_version=10**9)),
        orjson.dumps(says(payload_model=structs.replace(MODEL, top_k=0))),
        b'{"is_by_handle": true, "run_id": "\xff"}',
    ],
)
def test_an_answer_that_is_none_of_the_plugins_is_a_misfit(content: bytes) -> None:
    told = read_identity(content)
    assert isinstance(told, Misfit)
    assert told.code == "identity_unreadable"


@pytest.mark.parametrize(
    ("identity", "expected", "code"),
    [
        (FITS, EXPECTED, None),
        (structs.replace(FITS, payload_model=OTHER), EXPECTED, "model_mismatch"),
        (structs.replace(FITS, payload_model=None), EXPECTED, None),
        (structs.replace(FITS, run_id="run-2"), EXPECTED, "run_mismatch"),
        (structs.replace(FITS, run_id=None), EXPECTED, "run_mismatch"),
        (structs.replace(FITS, is_by_handle=False), EXPECTED, "by_handle_refused"),
    ],
)
def test_each_way_not_to_fit_has_a_name(
    identity: EngineIdentity, expected: Expected, code: str | None
) -> None:
    misfit = misfit_of(identity, expected)
    assert (None if misfit is None else misfit.code) == code


def test_nothing_is_compared_with_what_is_not_known_nor_asked_of_an_engine_that_is_spilled() -> (
    None
):
    unknown = Expected(is_by_handle=True, run_id=None, model=None, model_of="")
    assert misfit_of(structs.replace(FITS, run_id=None), unknown) is None
    spilled = Expected(is_by_handle=False, run_id=RUN, model=MODEL, model_of="")
    assert misfit_of(structs.replace(FITS, is_by_handle=False, run_id=None), spilled) is None


@pytest.mark.parametrize(
    ("told", "known", "found"),
    [
        (4, Weights(policy_version=0), Weights(policy_version=4, is_named=True)),
        (4, Weights(policy_version=5, is_reported=True), Weights(policy_version=4, is_named=True)),
        (None, Weights(policy_version=3), Weights(policy_version=1)),
        (None, Weights(policy_version=3, is_named=True), Weights(policy_version=1)),
        (
            None,
            Weights(policy_version=3, is_named=True, is_reported=True),
            Weights(policy_version=1),
        ),
        (
            None,
            Weights(policy_version=3, is_reported=True),
            Weights(policy_version=3, is_reported=True),
        ),
    ],
)
def test_what_an_engine_runs_follows_from_what_it_names(
    told: int | None, known: Weights, found: Weights
) -> None:
    identity = structs.replace(FITS, policy_version=told)
    assert weights_of(Said(identity=identity), known, at_start=1) == found


async def test_an_engine_of_another_model_than_its_sibling_does_not_serve(tmp_path: Path) -> None:
    engines = {"e0": StubEngine(identity=says()), "e1": StubEngine(identity=says())}
    async with running(engines, root=tmp_path / "root") as proxy:
        engines["e1"].identity = says(payload_model=OTHER)
        assert (await engine_view(proxy, "e1"))["is_serving"]
        view = (await proxy.http.post("/v1/engines/e1/return")).json()
        assert (view["state"], view["is_serving"]) == ("healthy", False)
        assert view["why_out"].startswith("model_mismatch: it serves ModelShape(")
        assert "engine e0 serves ModelShape(" in view["why_out"]
        for number in range(6):
            answer = await proxy.generate(request_body([number + 1]))
            assert answer.status_code == 200
        assert not engines["e1"].requests
        assert (await proxy.http.get("/readyz")).status_code == 200
        engines["e1"].identity = says()  # started anew, with the right model
        await until(lambda: proxy.parts.book.is_serving(proxy.parts.book.get("e1")))


async def test_an_engine_of_another_model_than_the_configuration_is_named_in_readiness(
    tmp_path: Path,
) -> None:
    config = tmp_path / "model.json"
    config.write_bytes(orjson.dumps(HF_CONFIG))
    engine = StubEngine(identity=says())
    async with running({"e0": engine}, model_config_path=config) as proxy:
        engine.identity = says(payload_model=OTHER)
        await proxy.http.post("/v1/engines/e0/return")
        ready = await proxy.http.get("/readyz")
        assert ready.status_code == 503
        (reason,) = ready.json()["reasons"]
        assert reason.startswith("no colocated engine serves (e0: model_mismatch: it serves")
        assert "model_config_path says" in reason
        refused = await proxy.generate(request_body([1]))
        assert (refused.status_code, refused.json()["code"]) == (503, "no_engine")


async def test_an_engine_whose_root_is_another_runs_serves_once_it_is_this_ones(
    tmp_path: Path,
) -> None:
    engines = {"e0": StubEngine(), "e1": StubEngine(identity=says(run_id="run-0"))}
    async with running(engines, root=tmp_path / "root") as proxy:
        assert (await engine_view(proxy, "e0"))["is_serving"]  # a stock engine says nothing
        view = await engine_view(proxy, "e1")
        assert not view["is_serving"]
        assert view["why_out"] == (
            "run_mismatch: its payload root has run run-0, the proxy's has run run-1"
        )
        engines["e1"].identity = says()
        await until(lambda: proxy.parts.book.is_serving(proxy.parts.book.get("e1")))


async def test_engines_are_asked_again_when_a_fresh_run_takes_the_root_over(
    tmp_path: Path,
) -> None:
    root, engine = tmp_path / "root", StubEngine(identity=says())
    async with running({"e0": engine}, root=root) as proxy:
        PayloadRoot.create(root, RunId("run-2"), fresh=True)
        await until(proxy.parts.book.missing_roles)  # its mount still shows the old run
        view = await engine_view(proxy, "e0")
        assert view["why_out"].startswith("run_mismatch: its payload root has run run-1")
        engine.identity = says(run_id="run-2")
        await until(lambda: not proxy.parts.book.missing_roles())


async def test_an_engine_that_refuses_to_write_serves_only_where_nothing_goes_by_handle(
    tmp_path: Path,
) -> None:
    refusing = says(is_by_handle=False, why_not="vLLM 0.99 is not known", run_id=None)
    async with running({"e0": StubEngine(identity=refusing)}) as proxy:
        assert (await proxy.generate(request_body([1]))).status_code == 200
    spilled = {"e0": StubEngine(identity=refusing, spills=True)}
    async with running(spilled, root=tmp_path / "spilled") as proxy:
        assert (await proxy.generate(request_body([1]))).json()["payload_segments"]
    both = {"e0": StubEngine(), "e1": StubEngine(identity=refusing)}
    async with running(both, root=tmp_path / "root") as proxy:
        view = await engine_view(proxy, "e1")
        assert not view["is_serving"]
        assert view["why_out"] == "by_handle_refused: it writes no rows: vLLM 0.99 is not known"


async def test_new_weights_do_not_go_to_an_engine_that_does_not_fit() -> None:
    engines = {"e0": StubEngine(identity=says()), "e1": StubEngine(identity=says())}
    async with running(engines) as proxy:
        engines["e1"].identity = says(payload_model=OTHER)
        await proxy.http.post("/v1/engines/e1/return")
        body = {"policy_version": 1, "weights_path": "/weights"}
        report = (await proxy.http.post("/v1/admin/weights", json=body)).json()
        assert (report["updated"], report["left_out"]) == (["e0"], ["e1"])
        assert not engines["e1"].admin_calls


async def test_an_engine_that_does_not_fit_holds_no_version_back() -> None:
    engines = {"e0": StubEngine(identity=says()), "e1": StubEngine(identity=says())}
    async with running(engines) as proxy:
        engines["e1"].identity = says(payload_model=OTHER)
        await proxy.http.post("/v1/engines/e1/return")
        for version, force in ((5, False), (3, True)):
            report = {"policy_version": version, "engines": ["e0"], "force": force}
            shown = (await proxy.http.post("/v1/policy-version", json=report)).json()
            assert (shown["applied"], shown["engines"]) == (version, {"e0": version, "e1": 0})


async def test_a_proxy_that_starts_takes_the_version_that_its_engines_name() -> None:
    engines = {
        "e0": StubEngine(identity=says(policy_version=5)),
        "e1": StubEngine(identity=says(policy_version=5)),
    }
    async with running(engines) as proxy:
        shown = (await proxy.http.get("/v1/policy-version")).json()
        assert (shown["applied"], shown["engines"]) == (5, {"e0": 5, "e1": 5})


async def test_what_an_engine_says_again_and_again_is_logged_once() -> None:
    engine = StubEngine(identity=says(policy_version=0, findings=["empty kept sets"]))
    with capture_logs() as logs:
        async with running({"e0": engine, "e1": StubEngine(identity=says())}) as proxy:
            body = {"policy_version": 3, "weights_path": "/weights"}
            await proxy.http.post("/v1/admin/weights", json=body)
            for version in (1, 1, 1, 2):
                engine.identity = says(policy_version=version, findings=["empty kept sets"])
                view = (await proxy.http.post("/v1/engines/e0/return")).json()
                assert view["why_out"] == f"stale weights: v{version} is behind v3"
    said = [log for log in logs if log.get("engine") == "e0"]
    named = [log["policy_version"] for log in said if log["event"] == "engine_identified"]
    assert [version for version in named if version in {1, 2}] == [1, 2]
    assert len(named) == len([log for log in said if log["event"] == "engine_finding"])


async def test_an_engine_that_was_started_anew_has_the_weights_of_its_start() -> None:
    engines = {"e0": StubEngine(identity=says()), "e1": StubEngine(identity=says())}
    async with running(engines) as proxy:
        body = {"policy_version": 3, "weights_path": "/weights"}
        assert (await proxy.http.post("/v1/admin/weights", json=body)).json()["applied"] == 3
        view = (await proxy.http.post("/v1/engines/e1/return")).json()  # it names none any more
        assert (view["policy_version"], view["is_serving"]) == (0, False)
        assert view["why_out"] == "stale weights: v0 is behind v3"
        report = {"policy_version": 3, "engines": ["e1"]}
        assert (await proxy.http.post("/v1/policy-version", json=report)).status_code == 200
        assert (await engine_view(proxy, "e1"))["is_serving"]
        view = (await proxy.http.post("/v1/engines/e1/return")).json()
        assert (view["policy_version"], view["is_serving"]) == (3, True), "a report counts"


@asynccontextmanager
async def recording(told: asyncio.Event, version: int) -> AsyncIterator[tuple[str, list[int]]]:
    """An orchestrator that tells its record only once ``told``; and what it was told."""
    app, pushed = FastAPI(), list[int]()

    @app.get("/v1/policy-version")
    async def tell() -> dict[str, int]:
        await told.wait()
        return {"policy_version": version}

    @app.put("/v1/policy-version")
    async def take(body: dict[str, int]) -> None:
        pushed.append(body["policy_version"])

    async with served(app) as url:
        yield url, pushed


async def test_a_proxy_that_starts_anew_goes_on_from_the_version_on_record() -> None:
    told = asyncio.Event()
    engines = {"stock": StubEngine(), "names": StubEngine(identity=says(policy_version=7))}
    engines["old"] = StubEngine(identity=says())
    async with recording(told, 6) as (url, pushed):
        asyncio.get_running_loop().call_later(0.3, told.set)
        async with running(engines, has_sockets=True, orchestrator_url=url) as proxy:
            assert told.is_set(), "no engine serves before"
            shown = (await proxy.http.get("/v1/policy-version")).json()
            assert shown["engines"] == {"stock": 6, "names": 7, "old": 0}
            assert (await engine_view(proxy, "old"))["why_out"] == "stale weights: v0 is behind v6"
            await until(lambda: pushed)
            assert min(pushed) == 6


async def test_nothing_is_served_nor_told_before_the_record_is_known() -> None:
    told = asyncio.Event()
    async with recording(told, 6) as (url, pushed), served(StubEngine().app()) as engine_url:
        engines = (EngineSettings(name="e0", url=engine_url),)
        app = create_app(
            ProxySettings(engines=engines, orchestrator_url=url, probe_interval_s=0.05)
        )
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://proxy") as http,
        ):
            ready = await http.get("/readyz")
            reasons = ["the orchestrator has not told the policy version yet"]
            assert (ready.status_code, ready.json()["reasons"]) == (503, reasons)
            unknown = await http.get("/v1/policy-version")
            assert (unknown.status_code, unknown.json()["code"]) == (503, "policy_version_unknown")
            assert app.state.parts.book.get("e0").health.state == "starting"
            assert pushed == []
            told.set()
            await until(lambda: not app.state.parts.book.missing_roles())
            assert (await http.get("/v1/policy-version")).json()["applied"] == 6
