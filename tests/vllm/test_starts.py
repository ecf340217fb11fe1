"""Servers that cannot give what is asked for: they say so at their start, and serve tokens."""

from pathlib import Path

import httpx
import pytest

from scripts.vllm_env.servers import running, start, why_not
from tests.vllm.comparing import GENERATE, Comparer, ask, body_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
FORGET = "import sideband.engines.vllm.versions as versions\nversions.KNOWN_LINES = ()\n"


@pytest.fixture(autouse=True)
def _needs_0_30() -> None:
    reason = why_not("0.30")
    if reason is not None:
        pytest.skip(reason)


async def test_a_server_that_captures_nothing_warns_and_serves_tokens_in_each_process(
    payload_root: Path, logs: Path, comparer: Comparer
) -> None:
    flags = ("--api-server-count", "2")
    server = start("0.30", logs / "bare.log", *flags, root=payload_root, captures=False)
    before = comparer.files()
    with running(server):
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            for number in range(8):
                extra = {"payload_dir": f"{payload_root}/v1"}
                body = body_of(
                    [1, 2, 3], f"bare-{number}", extra_args=extra, stream=number % 2 == 1
                )
                answer = await ask(http, body)
                assert len(answer.choices[0].token_ids) == 8
                assert answer.body["payload_segments"] == {"0": []}
    assert comparer.files() == before
    warned = "sideband: routing is not captured"
    lines = [line for line in server.log().splitlines() if warned in line]
    assert len(lines) == 2
    assert all(any(f"ApiServer_{n}" in line for line in lines) for n in range(2))


async def test_a_version_that_is_not_known_is_said_refused_and_served(
    payload_root: Path, logs: Path, tmp_path: Path, comparer: Comparer
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FORGET)
    variables = {"PYTHONPATH": str(tmp_path)}
    server = start("0.30", logs / "unknown.log", root=payload_root, variables=variables)
    before = comparer.files()
    with running(server):
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            extra = {"payload_dir": f"{payload_root}/v1"}
            refused = await http.post(GENERATE, json=body_of([1, 2], "no", extra_args=extra))
            assert refused.status_code == 400
            assert "is not known to this release" in refused.json()["error"]["message"]
            answer = await ask(http, body_of([1, 2, 3], "inline"))
            assert answer.choices[0].routed_experts is not None
            assert "routed_layer_ids" not in answer.body
            shown = (await http.get("/inference/v1/sideband")).json()
            assert not shown["is_by_handle"]
    assert "sideband: requests by handle are refused: vLLM 0.30" in server.log()
    assert comparer.files() == before
