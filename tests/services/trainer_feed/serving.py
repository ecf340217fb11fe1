"""A feed service in this process: its clients, steps and ranks."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from services.trainer_feed.app import create_app
from services.trainer_feed.config import FeedSettings
from sideband.feed.codec import STEP_CONTENT_TYPE, Step, encode_step
from sideband.feed.committer import StepCommitter
from sideband.feed.rank import RankFeed
from tests.unit.feed.builders import make_step
from tests.unit.feed.live import read_all

BINARY = {"content-type": STEP_CONTENT_TYPE}
WAIT_S = 10.0


def settings(**changes: Any) -> FeedSettings:
    return FeedSettings(
        **{"run_id": "run-a", "endpoint": "tcp://127.0.0.1:*", "cp_size": 2, **changes}
    )


@asynccontextmanager
async def running(**changes: Any) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    app = create_app(settings(**changes))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://feed", timeout=WAIT_S
        ) as client:
            yield client, app.state.server.bound_endpoint


def step_of(number: int, **changes: Any) -> Step:
    return make_step(
        **{"step": number, "form": None, "model": None, "dp_size": 1, "cp_size": 2, **changes}
    )


async def put(client: httpx.AsyncClient, step: Step, **headers: str) -> httpx.Response:
    return await client.put(
        f"/v1/steps/{step.step}", content=encode_step(step), headers={**BINARY, **headers}
    )


def rank(endpoint: str, cp_rank: int, **options: Any) -> RankFeed:
    return RankFeed(
        endpoint, dp_rank=0, cp_rank=cp_rank, threads=2, step_timeout_s=WAIT_S, **options
    )


def train(endpoint: str, cp_rank: int) -> list[tuple[int, int, str]]:
    with rank(endpoint, cp_rank) as feed:
        return read_all(feed)


def commit_one(endpoint: str, global_rank: int) -> None:
    with StepCommitter(endpoint, run_id="run-a", global_rank=global_rank) as committer:
        committer.commit(1)


def read_closed(endpoint: str, cp_rank: int) -> list[tuple[int, int, str]]:
    with rank(endpoint, cp_rank) as feed:
        return read_all(feed)
