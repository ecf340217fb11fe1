"""A weight update of a real server through the proxy's admin route."""

from pathlib import Path

import httpx
import pytest

from scripts.vllm_env.build import model_folder
from scripts.vllm_env.servers import BASE, VllmServer
from services.inference_proxy.app import create_app
from services.inference_proxy.config import EngineSettings, ProxySettings
from tests.services.inference_proxy.harness import until
from tests.vllm.comparing import Comparer, ask, body_of
from tests.vllm.report import Report

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
TRAIN = {"X-Sideband-Kind": "train"}


async def test_new_weights_answer_differently_and_carry_their_version(
    vllm_0_32: VllmServer, payload_root: Path, comparer: Comparer, report: Report
) -> None:
    row = report.row("0.32 weight updates")
    engines = (EngineSettings(name="e0", url=vllm_0_32.url),)
    settings = ProxySettings(
        engines=engines, payload_root=payload_root, return_probes=1, probe_timeout_s=20
    )
    app = create_app(settings)
    found = []
    async with app.router.lifespan_context(app):
        await until(lambda: not app.state.parts.book.missing_roles(), timeout_s=30)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://proxy", timeout=200
        ) as http:
            for version, seed in ((0, 0), (1, 1), (2, 0), (3, 1)):
                if version:
                    update = {
                        "policy_version": version,
                        "weights_path": str(model_folder(BASE, seed)),
                    }
                    reply = await http.post("/v1/admin/weights", json=update)
                    assert reply.status_code == 200, reply.text
                    assert reply.json()["applied"] == version
                body = body_of(
                    list(range(70)), f"w{version}", seed=5, extra_args={"payload_debug": True}
                )
                answer = await ask(http, body, TRAIN)
                comparer.check(answer, row)
                found.append(answer)
    # Loaded anew, not against the start: a CPU build may lay weights out otherwise at its start.
    _, second, third, fourth = (answer.choices[0] for answer in found)
    assert second.token_ids == fourth.token_ids
    assert second.routed_experts == fourth.routed_experts
    assert second.sampling_mask == fourth.sampling_mask
    assert second.routed_experts != third.routed_experts
    for version, answer in enumerate(found[1:], 1):
        (span,) = answer.body["choices"][0]["weight_versions"]
        assert span["version"] == str(version)
        (file,) = {segment.file for segment in answer.choices[0].segments}
        assert file.startswith(f"v{version}/")
