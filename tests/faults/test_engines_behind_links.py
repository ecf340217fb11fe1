"""Engines behind bad links, and environments behind one too: every turn is right, no file is lost.

A turn may fail cleanly and be asked for again; what is answered must equal the seeded truth, and
when a rollout's session is deleted, nothing of any lost attempt may stay.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from services.inference_proxy.app import create_app
from services.inference_proxy.config import EngineSettings as ProxyEngine
from services.inference_proxy.config import ProxySettings
from sideband.payload import PayloadReader, PayloadRoot
from simulation.comparison import Checks
from simulation.engine.app import build_app
from simulation.engine.settings import EngineSettings, Role
from simulation.environment import Environment
from simulation.generation import RUN_ID, make_root
from simulation.models import load_shape
from simulation.plan import RolloutPlan, Scenario, make_plan
from simulation.strays import emptied
from simulation.truth import Truth
from simulation.turn_check import check_turns
from tests.faults.network import FaultyLink, faulty_link
from tests.faults.seeds import Chance
from tests.services.inference_proxy.harness import served, until

MODEL = "sim-uint16"
CALM_AFTER_S = 4.0
TO_ENGINES = {"split": 0.05, "delay": 0.1, "reset": 0.02, "half_open": 0.01, "refuse": 0.03}
TO_CLIENTS = {"split": 0.05, "delay": 0.1, "reset": 0.02}


async def linked(
    stack: AsyncExitStack,
    app: Any,
    chance: Chance,
    rates: dict[str, float],
    links: list[FaultyLink],
) -> str:
    """The URL of ``app`` behind a real server and a faulty link."""
    port = urlsplit(await stack.enter_async_context(served(app))).port
    assert port is not None
    link = stack.enter_context(faulty_link(chance, port, rates))
    links.append(link)
    return f"http://127.0.0.1:{link.port}"


def calm_down(links: list[FaultyLink]) -> None:
    for link in links:
        link.calm()


async def delete_sessions(client: httpx.AsyncClient, url: str, plans: list[RolloutPlan]) -> None:
    for plan in plans:
        answer = await client.delete(f"{url}/v1/sessions/{plan.rollout_id}?delete_files=true")
        assert answer.status_code in {200, 404}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("roles", [("colocated", "colocated"), ("prefill", "decode", "decode")])
async def test_turns_through_bad_links_equal_the_truth(
    roles: tuple[Role, ...], chance: Chance, tmp_path: Path
) -> None:
    root = make_root(tmp_path / "root")
    truth = Truth(load_shape(MODEL), seed=4)
    plans = make_plan(Scenario(seed=chance.seed, groups=3, aborted_rate=0.0))
    links: list[FaultyLink] = []
    async with AsyncExitStack() as stack:
        engines = []
        for number, role in enumerate(roles):
            settings = EngineSettings(
                name=f"e{number}", role=role, model=MODEL, seed=4, payload_root=root
            )
            url = await linked(stack, build_app(settings), chance, TO_ENGINES, links)
            engines.append(ProxyEngine(name=settings.name, url=url, role=role))
        proxy = create_app(
            ProxySettings(
                engines=tuple(engines),
                payload_root=root,
                run_id=RUN_ID,
                probe_interval_s=0.1,
                probe_timeout_s=0.5,
                ejection_backoff_s=0.1,
                read_timeout_s=1.5,
                connect_timeout_s=0.5,
                delete_grace_s=0.3,
            )
        )
        direct = await stack.enter_async_context(served(proxy))
        await until(lambda: proxy.state.parts.book.missing_roles() == [])
        port = urlsplit(direct).port
        assert port is not None
        link = stack.enter_context(faulty_link(chance, port, TO_CLIENTS))
        links.append(link)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=20, trust_env=False))
        calm = asyncio.get_running_loop().call_later(CALM_AFTER_S, calm_down, links)
        environment = Environment(
            client=client,
            proxy_url=f"http://127.0.0.1:{link.port}",
            orchestrator_url=None,
            vocab_size=truth.model.vocab_size,
            concurrency=6,
            is_stubborn=True,
        )
        await environment.run(plans)
        calm.cancel()
        checks = Checks()
        with PayloadReader(PayloadRoot.open(root, run_id=RUN_ID), model=truth.model) as reader:
            await asyncio.to_thread(check_turns, checks, plans, environment.bodies, truth, reader)
        wrong = [(check.name, check.findings) for check in checks if not check.is_good]
        assert not wrong
        calm_down(links)
        await delete_sessions(client, direct, plans)
        assert await emptied(root) == []
    assert chance.injected
