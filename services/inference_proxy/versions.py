"""Tells the orchestrator which policy version the engines have applied, until it has taken it.

The newest version wins: one that was never taken is not sent after a newer one. The orchestrator
asks too (``GET /v1/policy-version``), so a push that never gets through costs only time.
"""

import asyncio
from typing import Final

import orjson
import structlog

from services.inference_proxy.engines import EngineBook
from services.inference_proxy.metrics import Metrics
from services.inference_proxy.upstream import Upstream, UpstreamError

PUSH_WAIT_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # the last one repeats
CHECK_INTERVAL_S: Final = 1.0  # an ejection can raise the least version without a report

log = structlog.get_logger(__name__)


class VersionPusher:
    """``run`` is owned by the app's task group and ends by cancellation."""

    def __init__(
        self,
        upstream: Upstream,
        book: EngineBook,
        *,
        url: str | None,
        token: str | None,
        timeout_s: float,
        metrics: Metrics,
    ) -> None:
        self._upstream, self._book, self._metrics = upstream, book, metrics
        self._timeout_s = timeout_s
        self._url = None if url is None else f"{url}/v1/policy-version"
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._woken = asyncio.Event()
        self.pushed: int | None = None
        self.failures = 0  # in a row

    @property
    def is_set(self) -> bool:
        """Whether there is anybody to tell."""
        return self._url is not None

    def wake(self) -> None:
        """Something may have changed."""
        self._woken.set()

    async def run(self) -> None:
        """Push whatever is new, until cancelled."""
        while self._url is not None:
            self._woken.clear()
            wait_s = CHECK_INTERVAL_S
            if self.pushed != self._book.applied and not await self._push(self._book.applied):
                wait_s = PUSH_WAIT_S[min(self.failures, len(PUSH_WAIT_S)) - 1]
            try:
                async with asyncio.timeout(wait_s):
                    await self._woken.wait()
            except TimeoutError:
                continue

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
