"""A simulated engine in this process, behind httpx."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson

from sideband.ids import RunId
from sideband.payload import PayloadRoot
from simulation.engine.app import build_app
from simulation.engine.settings import EngineSettings, Role

Json = dict[str, Any]
RUN_ID = RunId("run")
URL = "/inference/v1/generate"


@asynccontextmanager
async def engine(role: Role = "colocated", **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of one engine."""
    app = build_app(EngineSettings(name=role, role=role, **{"seed": 4, **settings}))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


def body(prompt: list[int], **params: Any) -> Json:
    """A request that a server with masks takes."""
    sampling = {"max_tokens": 12, "temperature": 1.0, "top_k": 20, "seed": 9, "logprobs": 0}
    return {"request_id": "r1", "token_ids": prompt, "sampling_params": {**sampling, **params}}


def by_handle(root: Path, request: Json, *, version: int = 3) -> Json:
    """The same request with what the proxy injects."""
    extra = {"payload_dir": f"{root}/v{version}", "payload_run_id": RUN_ID}
    params = request["sampling_params"]
    extra = {**(params.get("extra_args") or {}), **extra}
    return {**request, "sampling_params": {**params, "extra_args": extra}}


def make_root(path: Path) -> Path:
    """A payload root of the run."""
    PayloadRoot.create(path, RUN_ID, fresh=True)
    return path


async def ask(client: httpx.AsyncClient, request: Json) -> Json:
    """The answer of a request that must succeed."""
    answer = await client.post(URL, json=request)
    assert answer.status_code == 200, answer.text
    whole: Json = answer.json()
    return whole


def events(content: bytes) -> list[Json]:
    """The JSON events of a stream."""
    lines = [line[6:] for line in content.split(b"\n\n") if line.startswith(b"data: {")]
    return [orjson.loads(line) for line in lines]
