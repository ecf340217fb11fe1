"""A slow filesystem delays the request that writes, never the engine's other requests (P28)."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from sideband.ids import RunId
from sideband.payload.root import PayloadRoot
from simulation.engine.app import build_app
from simulation.engine.settings import EngineSettings

SLOW_S = 0.3
BODY: dict[str, Any] = {"token_ids": [5, 6, 7], "request_id": "q"}


async def test_a_slow_disk_holds_up_no_other_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    PayloadRoot.create(root, RunId("run-1"), fresh=True)
    syncs: list[int] = []

    def slow_sync(fd: int) -> None:
        syncs.append(fd)
        time.sleep(SLOW_S)

    monkeypatch.setattr(os, "fsync", slow_sync)
    app = build_app(EngineSettings(name="c0", role="colocated", payload_root=root))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        params = {"max_tokens": 4, "temperature": 1.0, "top_k": 5}
        extra = {"payload_dir": str(root / "v0"), "payload_run_id": "run-1"}
        by_handle = {**BODY, "sampling_params": {**params, "extra_args": extra}}
        writing = asyncio.create_task(http.post("/inference/v1/generate", json=by_handle))
        async with asyncio.timeout(5):
            while not syncs:  # noqa: ASYNC110 - the write has begun
                await asyncio.sleep(0.005)
        began_s = time.perf_counter()
        inline = await http.post("/inference/v1/generate", json={**BODY, "sampling_params": params})
        waited_s = time.perf_counter() - began_s
        assert inline.json()["choices"][0]["routed_experts"]
        assert not writing.done()
        assert waited_s < SLOW_S
        assert (await writing).json()["payload_segments"]["0"]
