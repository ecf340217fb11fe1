"""Orchestrator and trainer feed of one run, in this process; ranks connect to the feed over ZMQ."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from fastapi import FastAPI

from services.kit import logs
from services.orchestrator.app import create_app as create_orchestrator
from services.orchestrator.config import OrchestratorSettings
from services.trainer_feed.app import create_app as create_feed
from services.trainer_feed.config import FeedSettings
from sideband.batch.types import Layout
from sideband.ids import RunId

RUN: Final = RunId("train-tiny-moe")
CALL_TIMEOUT_S: Final = 30.0
STEP_TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.05


class RunFailed(Exception):
    """The run cannot go on: a refused call, a stopped run, a step that no rank commits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The grid of ranks and the size of a step."""

    dp_size: int
    cp_size: int
    layout: Layout
    seq_len: int
    step_rollouts: int
    config_path: Path
    payload_root: Path


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Services:
    """The services behind their clients."""

    orchestrator: httpx.AsyncClient
    feed: httpx.AsyncClient
    endpoint: str

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """The orchestrator's answer. Raises RunFailed when it refuses."""
        answer = await self.orchestrator.request(method, path, json=body)
        if not answer.is_success:
            raise RunFailed(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        return answer.json()

    async def committed(self, step: int, *, ranks_ended: "asyncio.Task[None]") -> None:
        """Wait until every rank has committed ``step``. Raises RunFailed, or what the ranks' task
        raised when it ends before that."""
        async with asyncio.timeout(STEP_TIMEOUT_S):
            while True:
                if ranks_ended.done():
                    ranks_ended.result()
                    raise RunFailed(f"the ranks ended before step {step} was committed")
                answer = await self.feed.get("/v1/acknowledgements")
                if (answer.json()["committed_step"] or 0) >= step:
                    return
                run = await self.call("GET", "/v1/run")
                if run["phase"] == "stopped" or run["feed_failure"]:
                    raise RunFailed(f"step {step}: {run['reason'] or run['feed_failure']}")
                await asyncio.sleep(POLL_S)

    async def ended(self) -> None:
        """Drain the run and wait for its end."""
        run = await self.call("POST", "/v1/admin/drain")
        async with asyncio.timeout(STEP_TIMEOUT_S):
            while run["phase"] != "ended":
                await asyncio.sleep(POLL_S)
                run = await self.call("GET", "/v1/run")


@asynccontextmanager
async def running(job: Job) -> AsyncIterator[Services]:
    """Both services, started and stopped in order. The payload root is made, or wiped if it is
    one that a run of this example made."""
    grid: dict[str, Any] = {
        "run_id": RUN,
        "dp_size": job.dp_size,
        "cp_size": job.cp_size,
        "layout": job.layout,
        "log_level": "error",  # holes and missing masks are warnings, and meant here
    }
    feed_app = create_feed(FeedSettings(endpoint="tcp://127.0.0.1:*", **grid))
    settings = OrchestratorSettings(
        payload_root=job.payload_root,
        start="fresh",
        model_config_path=job.config_path,
        feed_url="http://feed",
        seq_len=job.seq_len,
        step_rollouts=job.step_rollouts,
        initial_policy_version=0,
        keep_rows_around_holes=True,
        deterministic=True,
        feed_poll_s=POLL_S,
        tick_s=POLL_S,
        **grid,
    )
    logs.configure(settings)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(feed_app.router.lifespan_context(feed_app))
        app = create_orchestrator(settings, feed_transport=httpx.ASGITransport(feed_app))
        await stack.enter_async_context(app.router.lifespan_context(app))
        yield Services(
            orchestrator=await stack.enter_async_context(_client(app)),
            feed=await stack.enter_async_context(_client(feed_app)),
            endpoint=feed_app.state.server.bound_endpoint,
        )


def _client(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://run", timeout=CALL_TIMEOUT_S)
