"""The services of one run behind real servers, on a loop of their own thread."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from tests.integration.way import running_way
from tests.services.inference_proxy.harness import served_started
from tests.services.inference_proxy.stub import StubEngine

Urls = dict[str, str]
WAIT_S = 30.0


@contextlib.contextmanager
def served_services(root: Path, model_config: Path) -> Iterator[Urls]:
    """Base URL of each service by name."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    started: Future[Urls] = Future()

    async def serve() -> None:
        engines = {"e0": StubEngine()}
        async with (
            running_way(engines, root=root, model_config=model_config, cp_size=1) as way,
            served_started(way.proxy.app) as proxy_url,
            served_started(way.orchestrator_app) as orchestrator_url,
            served_started(way.feed_app) as feed_url,
        ):
            urls = {
                "inference_proxy": proxy_url,
                "orchestrator": orchestrator_url,
                "trainer_feed": feed_url,
            }
            started.set_result(urls)
            await stop.wait()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=run, name="fuzzed-services")
    thread.start()
    try:
        yield started.result(WAIT_S)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_S)
