"""Answers that name no weights, of engines that can name them: OpenAI routes beside the plugin."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.inference_proxy.harness import TRAIN, Running, running, until
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.test_sampled import report, view_of

BODY = {"model": "m", "prompt": "Hello", "max_tokens": 4}


def identity(version: int | None) -> dict[str, Any]:
    return {"is_by_handle": True, "run_id": "run-1", "policy_version": version}


async def turn(proxy: Running) -> httpx.Response:
    return await proxy.http.post("/v1/completions", json=BODY, headers=TRAIN)


async def named(proxy: Running, engine: StubEngine, version: int) -> None:
    """It has weights that it names, and the proxy knows."""
    engine.identity = identity(version)
    await report(proxy, version)
    await until(lambda: not proxy.parts.book.get("e0").is_doubted)


@pytest.mark.parametrize("after", [identity(None), identity(2), None])
async def test_an_engine_that_was_started_anew_unseen_keeps_no_turn(
    tmp_path: Path, after: dict[str, Any] | None
) -> None:
    engine = StubEngine(identity=identity(None))
    async with running({"e0": engine}, root=tmp_path / "root", probe_interval_s=0.05) as proxy:
        await named(proxy, engine, 3)
        assert (await turn(proxy)).status_code == 200
        engine.identity = after  # every probe is answered, before and after
        refused = await turn(proxy)
        assert (refused.status_code, refused.json()["code"]) == (503, "no_engine")
        assert len(proxy.parts.keeper.turns) == 1
        version = 2 if after == identity(2) else 0
        assert (await view_of(proxy, "e0"))["why_out"] == f"stale weights: v{version} is behind v3"
        await named(proxy, engine, 4)
        assert (await turn(proxy)).status_code == 200
        assert len(proxy.parts.keeper.turns) == 2


async def test_an_engine_that_never_named_its_weights_is_not_asked(tmp_path: Path) -> None:
    engine = StubEngine(identity=identity(None))
    async with running({"e0": engine}, root=tmp_path / "root", probe_interval_s=0.05) as proxy:
        await report(proxy, 3)
        await until(lambda: not proxy.parts.book.get("e0").is_doubted)
        assert (await turn(proxy)).status_code == 200
        assert (await view_of(proxy, "e0"))["policy_version"] == 3


async def test_an_engine_that_says_nothing_legible_has_not_answered(tmp_path: Path) -> None:
    engine = StubEngine(identity=identity(None))
    async with running({"e0": engine}, root=tmp_path / "root", probe_interval_s=60) as proxy:
        book = proxy.parts.book
        await named_by_hand(proxy, engine)
        engine.identity = {"is_by_handle": 1}
        refused = await turn(proxy)
        assert (refused.status_code, refused.json()["code"]) == (502, "upstream_failed")
        assert (len(proxy.parts.keeper.turns), book.get("e0").policy_version) == (0, 3)


async def named_by_hand(proxy: Running, engine: StubEngine) -> None:
    """The same without waiting for a probe."""
    engine.identity = identity(3)
    await report(proxy, 3)
    await proxy.parts.probes.probe(proxy.parts.book.get("e0"))
