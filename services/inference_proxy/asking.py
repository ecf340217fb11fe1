"""Asks engines what they are, and by what their process is told from the one after it.

The plugin's route says both. Without the route, or from an earlier plugin, the process shows in the
engine's metrics: the time of its start, of which vLLM tells where one process serves its API.
"""

import asyncio
import re
from collections.abc import Iterable
from typing import Final

from services.inference_proxy.engine import Engine
from services.inference_proxy.headers import to_engine
from services.inference_proxy.identity import EngineIdentity, Misfit, Said, read_identity
from services.inference_proxy.upstream import (
    EngineBroke,
    EngineRefused,
    Upstream,
    UpstreamError,
)

NO_SUCH_ROUTE: Final = 404
_REDIRECTS: Final = range(300, 400)
# With the slash vLLM looks at this one value: a thousandth of a second, and not of all it counts.
METRICS_PATH: Final = "/metrics/?name%5B%5D=process_start_time_seconds"
REPORT_WAIT_S: Final = 2.0  # of whoever reports weights, for an engine that does not answer
_START: Final = re.compile(rb"^process_start_time_seconds ([0-9.e+]{1,40})$", re.MULTILINE)


class Asking:
    """``token`` is the engines' own credential."""

    def __init__(self, upstream: Upstream, *, token: str | None) -> None:
        self._upstream = upstream
        self._headers = dict(to_engine((), token=token))

    async def ask(self, engine: Engine, *, timeout_s: float) -> Said:
        """What it says now; each question has ``timeout_s``. Raises UpstreamError.

        Only a 404 means that it has no such route. Another refusal says nothing of what it is,
        and such an engine fits nowhere.
        """
        path = engine.dialect.identity_path
        if path is None:
            return Said(identity=None)
        identity: EngineIdentity | Misfit | None = None
        try:
            identity = read_identity(await self._get(engine, path, timeout_s=timeout_s))
        except EngineRefused as exc:
            if exc.status != NO_SUCH_ROUTE:
                identity = Misfit(code="identity_unreadable", message=f"{path}: {exc.reason}"[:300])
        if isinstance(identity, Misfit):
            return Said(identity=identity)
        process = None if identity is None else identity.engine_process
        if process is None:
            process = await self._process_of(engine, timeout_s=timeout_s)
        return Said(identity=identity, process=process)

    async def processes(self, engines: Iterable[Engine]) -> dict[str, str]:
        """The processes that run now, by engine, of those that answer and are told apart by one."""
        asked = list(engines)
        found = await asyncio.gather(*(self._process_now(engine) for engine in asked))
        return {
            engine.name: process
            for engine, process in zip(asked, found, strict=True)
            if process is not None
        }

    async def _process_now(self, engine: Engine) -> str | None:
        try:
            async with asyncio.timeout(REPORT_WAIT_S):
                return (await self.ask(engine, timeout_s=REPORT_WAIT_S)).process
        except (UpstreamError, TimeoutError):
            return None

    async def _process_of(self, engine: Engine, *, timeout_s: float) -> str | None:
        """By its metrics. One that told it before must tell it again, or have no such route: where
        it leads elsewhere is none.
        """
        try:
            content = await self._get(engine, METRICS_PATH, timeout_s=timeout_s)
        except EngineRefused as exc:
            if exc.status == NO_SUCH_ROUTE or engine.weights.process is None:
                return None
            raise EngineBroke(engine.name, f"{METRICS_PATH}: {exc.reason}"[:300]) from exc
        except EngineBroke as exc:
            if exc.status not in _REDIRECTS:
                raise
            return None
        found = _START.search(content)
        return None if found is None else f"started {found[1].decode()}"

    async def _get(self, engine: Engine, path: str, *, timeout_s: float) -> bytes:
        async with self._upstream.open(
            engine.name,
            f"{engine.url}{path}",
            method="GET",
            headers=self._headers,
            timeout_s=timeout_s,
        ) as reply:
            return await reply.whole()
