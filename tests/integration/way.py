"""Proxy, orchestrator, feed and ranks of one run in this process: the whole way of a token."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from fastapi import FastAPI

from services.orchestrator.app import create_app as create_orchestrator
from services.orchestrator.config import OrchestratorSettings
from services.trainer_feed.app import create_app as create_feed
from services.trainer_feed.config import FeedSettings
from sideband.batch.types import Layout
from sideband.feed.micro_batch import RankMicroBatch
from sideband.feed.rank import RankFeed
from tests.services.inference_proxy.harness import RUN, Running
from tests.services.inference_proxy.harness import running as running_proxy
from tests.services.inference_proxy.stub import StubEngine

WAIT_S: Final = 20.0


@dataclass(slots=True)
class Way:
    """The services of one run behind their clients."""

    proxy: Running
    orchestrator: httpx.AsyncClient
    feed: httpx.AsyncClient
    endpoint: str
    root: Path | None
    cp_size: int
    orchestrator_app: FastAPI
    feed_app: FastAPI

    async def train(self) -> list[list[RankMicroBatch]]:
        """Every rank to the end of the run; its micro batches, by CP rank."""
        ranks = [asyncio.to_thread(self._rank, cp_rank) for cp_rank in range(self.cp_size)]
        return await asyncio.gather(*ranks)

    def _rank(self, cp_rank: int) -> list[RankMicroBatch]:
        batches = []
        with RankFeed(
            self.endpoint,
            dp_rank=0,
            cp_rank=cp_rank,
            payload_root=self.root,
            threads=4,
            step_timeout_s=WAIT_S,
        ) as feed:
            for step in feed:
                batches += list(step)
                step.commit()
        return batches


@asynccontextmanager
async def running_way(
    engines: dict[str, StubEngine],
    *,
    root: Path | None,
    model_config: Path,
    cp_size: int,
    layout: Layout = "contiguous",
    **orchestrator: Any,
) -> AsyncIterator[Way]:
    """All services of one run, started and stopped in order."""
    async with AsyncExitStack() as stack:
        feed_app = create_feed(
            FeedSettings(run_id=RUN, endpoint="tcp://127.0.0.1:*", cp_size=cp_size, layout=layout)
        )
        await stack.enter_async_context(feed_app.router.lifespan_context(feed_app))
        proxy = await stack.enter_async_context(
            running_proxy(engines, root=root, model_config_path=model_config)
        )
        settings = OrchestratorSettings(
            run_id=RUN,
            payload_root=root,
            start="resume",
            model_config_path=model_config,
            feed_url="http://feed",
            proxy_url="http://proxy",
            cp_size=cp_size,
            layout=layout,
            **orchestrator,
        )
        app = create_orchestrator(
            settings,
            feed_transport=httpx.ASGITransport(feed_app),
            proxy_transport=httpx.ASGITransport(proxy.app),
        )
        await stack.enter_async_context(app.router.lifespan_context(app))
        http = await stack.enter_async_context(_client(app))
        feed_http = await stack.enter_async_context(_client(feed_app))
        async with asyncio.timeout(WAIT_S):
            while (await http.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - polled
                await asyncio.sleep(0.02)
        endpoint: str = feed_app.state.server.bound_endpoint
        yield Way(proxy, http, feed_http, endpoint, root, cp_size, app, feed_app)


def _client(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://way", timeout=WAIT_S)
