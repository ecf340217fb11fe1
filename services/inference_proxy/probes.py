"""Keeps engines' health and the payload root up to date: a task per engine, one for the root."""

import asyncio
import time
from concurrent.futures import Executor

import structlog

from services.inference_proxy.asking import Asking
from services.inference_proxy.engine import Engine
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.identity import EngineIdentity, Misfit
from services.inference_proxy.metrics import Metrics
from services.inference_proxy.payloads import RootHandle
from services.inference_proxy.upstream import Upstream, UpstreamError

log = structlog.get_logger(__name__)


class Probes:
    """``run`` is owned by the app's task group and ends by cancellation.

    No engine is probed, and so none serves, before ``settled``: the policy version on record is
    known then.
    """

    def __init__(
        self,
        upstream: Upstream,
        asking: Asking,
        book: EngineBook,
        root: RootHandle,
        *,
        interval_s: float,
        timeout_s: float,
        token: str | None,
        metrics: Metrics,
        executor: Executor,
        settled: asyncio.Event,
    ) -> None:
        self._upstream, self._asking, self._book, self._root = upstream, asking, book, root
        self._interval_s, self._timeout_s, self._metrics = interval_s, timeout_s, metrics
        self._executor, self._settled = executor, settled
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}

    async def run(self) -> None:
        """Probe until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_root())
            await self._settled.wait()
            for engine in self._book:
                group.create_task(self._watch(engine))

    async def probe(self, engine: Engine) -> None:
        """One probe. Held engines are probed too, so that a release finds a fresh view."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._get(engine, engine.dialect.health_path)
                await self._identify(engine)
        except (UpstreamError, TimeoutError) as exc:
            reason = str(exc) or f"no answer to a probe within {self._timeout_s:g} s"
            is_dead = isinstance(exc, UpstreamError) and exc.is_dead
            if self._book.failed(
                engine, reason, now_s=time.monotonic(), is_dead=is_dead, is_probe=True
            ):
                self._metrics.ejections_total.labels(engine.name).inc()
                log.warning("engine_ejected", engine=engine.name, reason=reason)
        else:
            if self._book.probed(engine, now_s=time.monotonic()) and engine.is_fit:
                log.info("engine_serves", engine=engine.name)
        self._metrics.engine_serving.labels(engine.name).set(self._book.is_serving(engine))
        self._metrics.policy_version_applied.set(self._book.applied)

    async def _identify(self, engine: Engine) -> None:
        """Ask what the engine is, unless that is known. Raises UpstreamError."""
        run_id = self._run_id()
        if not self._book.must_ask(engine, run_id=run_id):
            return
        known, doubts, before = engine.weights, engine.doubts, engine.identity
        said = await self._asking.ask(engine, timeout_s=self._timeout_s)
        told = said.identity
        is_changed = self._book.told(engine, said, run_id=run_id, known=known, doubts=doubts)
        if not isinstance(told, Misfit) and known.are_of_another(said.process):
            log.warning(
                "engine_started_anew", engine=engine.name, policy_version=engine.policy_version
            )
        if is_changed and engine.misfit is not None:
            log.error(
                "engine_misfits",
                engine=engine.name,
                code=engine.misfit.code,
                reason=engine.misfit.message,
            )
        elif isinstance(told, EngineIdentity) and engine.misfit is None and told != before:
            log.info("engine_identified", engine=engine.name, policy_version=told.policy_version)
            for finding in told.findings:
                log.warning("engine_finding", engine=engine.name, finding=finding)

    async def _get(self, engine: Engine, path: str) -> bytes:
        async with self._upstream.open(
            engine.name,
            f"{engine.url}{path}",
            method="GET",
            headers=self._headers,
            timeout_s=self._timeout_s,
        ) as reply:
            return await reply.whole()

    def _run_id(self) -> str | None:
        """The run of the payload root, once it is there."""
        root = self._root.current
        return None if root is None else root.run_id

    async def _watch(self, engine: Engine) -> None:
        while True:
            await self.probe(engine)
            await asyncio.sleep(self._interval_s)

    async def _watch_root(self) -> None:
        loop = asyncio.get_running_loop()
        while self._root.is_set:
            await loop.run_in_executor(self._executor, self._root.refresh)
            await asyncio.sleep(self._interval_s)
