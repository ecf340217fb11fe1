"""Kept turns that the proxy need not keep any longer: told in order, best effort."""

import asyncio

import structlog

from services.orchestrator.limits import RELEASES_MAX
from services.orchestrator.proxy_client import ProxyCallFailed, ProxyClient, TurnsAsked

log = structlog.get_logger(__name__)


class Releases:
    """A bounded queue; what the proxy is never told about expires there by itself."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[TurnsAsked] = asyncio.Queue(RELEASES_MAX)

    def add(self, asked: TurnsAsked) -> None:
        """These turns were handed in durably."""
        try:
            self._asked.put_nowait(asked)
        except asyncio.QueueFull:
            log.warning("turn_release_skipped")

    async def run(self, proxy: ProxyClient) -> None:
        """Tell the proxy, until cancelled."""
        while True:
            asked = await self._asked.get()
            try:
                await proxy.release_turns(asked)
            except ProxyCallFailed as exc:
                log.warning("turn_release_failed", error=str(exc))
