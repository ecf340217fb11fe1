"""What a real server says of itself, and what a proxy that starts makes of it."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.vllm_env.model import CONFIG
from scripts.vllm_env.servers import VllmServer, running, start
from services.inference_proxy.app import create_app
from services.inference_proxy.asking import METRICS_PATH
from services.inference_proxy.config import EngineSettings, ProxySettings
from services.inference_proxy.engine import Engine
from tests.services.inference_proxy.harness import until
from tests.vllm.comparing import GENERATE, Comparer, ask, body_of
from tests.vllm.report import Report

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
TRAIN = {"X-Sideband-Kind": "train"}


@asynccontextmanager
async def proxied(
    server: VllmServer, root: Path | None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Engine]]:
    """A proxy that has asked its one engine: its client, and what it knows of the engine."""
    engines = (EngineSettings(name="e0", url=server.url),)
    app = create_app(
        ProxySettings(engines=engines, payload_root=root, probe_timeout_s=20, **settings)
    )
    async with app.router.lifespan_context(app):
        engine: Engine = app.state.parts.book.get("e0")
        await until(lambda: engine.health.state == "healthy", timeout_s=30)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://proxy", timeout=60
        ) as http:
            yield http, engine


@pytest.mark.parametrize("line", ["0.30", "0.32"])
async def test_a_server_tells_by_its_process_that_it_is_the_same(
    request: pytest.FixtureRequest, line: str
) -> None:
    """Whole and streamed, in its answers, its identity and its metrics."""
    server: VllmServer = request.getfixturevalue(f"vllm_{line.replace('.', '_')}")
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        words = [(await http.get("/inference/v1/sideband")).json()["engine_process"]]
        for stream in (False, True):
            body = body_of(list(range(40)), f"process-{stream}", seed=3, extra_args={})
            answer = await http.post(GENERATE, json={**body, "stream": stream})
            assert answer.status_code == 200, answer.text
            found = re.findall(r'"engine_process": ?"([0-9a-f]+)"', answer.text)
            assert len(found) == 1
            words += found
        assert len(set(words)) == 1
        starts = [(await http.get(METRICS_PATH)).text.splitlines()[-1] for _ in range(2)]
        assert starts[0] == starts[1]
        assert re.fullmatch(r"process_start_time_seconds [0-9.e+]+", starts[0])


async def name_weights(server: VllmServer, name: str) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as engine:
        named = await engine.post("/update_weight_version", json={"new_version": name})
        assert named.status_code == 200, named.text


async def test_a_proxy_that_starts_takes_the_version_of_the_weights_and_refuses_another_model(
    vllm_0_32: VllmServer, payload_root: Path, comparer: Comparer, report: Report, tmp_path: Path
) -> None:
    row = report.row("0.32 after a restart of the proxy")
    await name_weights(vllm_0_32, "11")
    async with proxied(vllm_0_32, payload_root) as (http, _):
        shown = (await http.get("/v1/policy-version")).json()
        assert (shown["applied"], shown["engines"]) == (11, {"e0": 11})
        body = body_of(list(range(40)), "named", seed=3, extra_args={"payload_debug": True})
        answer = await ask(http, body, TRAIN)
        comparer.check(answer, row)
        (file,) = {segment.file for segment in answer.choices[0].segments}
        assert file.startswith("v11/")
    await name_weights(vllm_0_32, "default")  # as it was started: others use it too
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CONFIG, "num_experts": 32}))
    async with proxied(vllm_0_32, payload_root, model_config_path=config) as (http, _):
        ready = await http.get("/readyz")
        assert ready.status_code == 503
        (reason,) = ready.json()["reasons"]
        assert reason.startswith("no colocated engine serves (e0: model_mismatch: it serves")


async def test_a_server_that_was_started_anew_unseen_answers_no_train_request(
    vllm_0_30: VllmServer, payload_root: Path, logs: Path
) -> None:
    """0.30 names the weights of no token. One server stands for the other's next start."""
    stock = start("0.30", logs / "0.30-stock.log", root=None, variables={"VLLM_PLUGINS": ""})
    with running(stock) as (other,):
        async with proxied(vllm_0_30, None, probe_interval_s=3600) as (http, engine):
            for version, (now, later) in enumerate([(vllm_0_30, other), (other, vllm_0_30)], 3):
                engine.url = now.url
                report = {"policy_version": version}
                assert (await http.post("/v1/policy-version", json=report)).status_code == 200
                for stream in (False, True):
                    body = body_of([1, 2, 3, 4], f"r{version}-{stream}", seed=3, extra_args={})
                    taken = await http.post(
                        GENERATE, json={**body, "stream": stream}, headers=TRAIN
                    )
                    assert taken.status_code == 200, taken.text
                    assert "error" not in taken.text
                engine.url = later.url
                refused = await http.post(GENERATE, json=body, headers=TRAIN)
                assert refused.status_code == 503, refused.text
                assert (engine.policy_version, engine.health.state) == (0, "healthy")
