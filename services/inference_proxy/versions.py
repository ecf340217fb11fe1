"""Tells the orchestrator which policy version the engines have applied, until it has taken it.

The newest version wins: one that was never taken is not sent after a newer one. The orchestrator
asks too (``GET /v1/policy-version``), so a push that never gets through costs only time.

Before anything else the orchestrator is asked what it has on record: a proxy that was started anew
would otherwise take the version back to that of the run's start (decisions/0037).
"""

import asyncio
from itertools import count
from typing import Final

import msgspec
import orjson
import structlog

from services.inference_proxy.engines import EngineBook
from services.inference_proxy.metrics import Metrics
from services.inference_proxy.siblings import Siblings
from services.inference_proxy.upstream import Upstream, UpstreamError

PUSH_WAIT_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # the last one repeats
CHECK_INTERVAL_S: Final = 1.0  # an ejection can raise the least version without a report

log = structlog.get_logger(__name__)


class _Recorded(msgspec.Struct, frozen=True):
    policy_version: int | None


class VersionPusher:
    """``run`` is owned by the app's task group and ends by cancellation.

    ``settled`` is set once the version on record is known.
    """

    def __init__(
        self,
        upstream: Upstream,
        book: EngineBook,
        siblings: Siblings,
        settled: asyncio.Event,
        *,
        url: str | None,
        token: str | None,
        timeout_s: float,
        metrics: Metrics,
    ) -> None:
        self._upstream, self._book, self._metrics = upstream, book, metrics
        self._siblings = siblings
        self._timeout_s = timeout_s
        self._url = None if url is None else f"{url}/v1/policy-version"
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._woken = asyncio.Event()
        self.settled = settled
        self.pushed: int | None = None
        self.failures = 0  # in a row

    def wake(self) -> None:
        """Something may have changed."""
        self._woken.set()

    async def run(self) -> None:
        """Learn what is on record, then push whatever is new, until cancelled."""
        if self._url is not None:
            await self._learn(self._url)
        while self._url is not None:
            self._woken.clear()
            wait_s = CHECK_INTERVAL_S
            applied = self._siblings.applied(self._book.applied)
            if self.pushed != applied and not await self._push(applied):
                wait_s = PUSH_WAIT_S[min(self.failures, len(PUSH_WAIT_S)) - 1]
            try:
                async with asyncio.timeout(wait_s):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def _learn(self, url: str) -> None:
        """Ask until the orchestrator has told what is on record."""
        for attempt in count():
            try:
                recorded = await self._recorded(url)
            except (UpstreamError, msgspec.MsgspecError) as exc:
                log.warning("version_not_learnt", error=str(exc)[:300])
                await asyncio.sleep(PUSH_WAIT_S[min(attempt, len(PUSH_WAIT_S) - 1)])
                continue
            if recorded is not None:
                self._book.begin_at(recorded)
            await self._siblings.begin()
            self.settled.set()
            log.info("version_learnt", policy_version=recorded)
            return

    async def _recorded(self, url: str) -> int | None:
        async with self._upstream.open(
            "orchestrator", url, method="GET", headers=self._headers, timeout_s=self._timeout_s
        ) as reply:
            return msgspec.json.decode(await reply.whole(), type=_Recorded).policy_version

    async def _push(self, version: int) -> bool:
        assert self._url is not None
        try:
            async with self._upstream.open(
                "orchestrator",
                self._url,
                method="PUT",
                content=orjson.dumps({"policy_version": version}),
                headers=self._headers,
                timeout_s=self._timeout_s,
            ):
                pass
        except UpstreamError as exc:
            self.failures += 1
            self._metrics.push_failures_total.inc()
            log.warning("version_push_failed", policy_version=version, error=exc.reason[:300])
            return False
        self.pushed, self.failures = version, 0
        self._metrics.policy_version_pushed.set(version)
        log.info("version_pushed", policy_version=version)
        return True
