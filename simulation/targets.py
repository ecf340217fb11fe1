"""What runs in each process of the cluster. Importing this imports all services: it is preloaded.

Services run exactly as ``python -m services.<name>`` runs them; only their settings come as values.
"""

import asyncio

import uvicorn

from services.inference_proxy.config import ProxySettings
from services.inference_proxy.workers.serving import serve_proxy
from services.kit.run import serve
from services.orchestrator.app import create_app as create_orchestrator
from services.orchestrator.config import OrchestratorSettings
from services.trainer_feed.app import create_app as create_feed
from services.trainer_feed.config import FeedSettings
from simulation.engine.app import build_app
from simulation.engine.settings import EngineSettings
from simulation.mortal import MortalSettings, run_mortal
from simulation.rank import RankSettings, run_rank


def engine(settings: EngineSettings) -> None:
    """A simulated engine, until it is told to end."""
    uvicorn.run(
        build_app(settings),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
    )


def proxy(settings: ProxySettings) -> None:
    """The inference proxy, of one process or several."""
    serve_proxy(settings)


def orchestrator(settings: OrchestratorSettings) -> None:
    """The orchestrator."""
    serve(create_orchestrator(settings), settings)


def feed(settings: FeedSettings) -> None:
    """The trainer feed."""
    serve(create_feed(settings), settings)


def environment(settings: MortalSettings) -> None:
    """An environment, until every rollout is delivered or given up."""
    asyncio.run(run_mortal(settings))


def rank(settings: RankSettings) -> None:
    """A trainer rank, until the feed ends."""
    run_rank(settings)
