"""A live run: rollouts arrive while steps train and weights change, as in production."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import httpx

from simulation.bodies import Json
from simulation.calls import RunStopped, checked
from simulation.plan import RolloutPlan

POLL_S: Final = 0.05
END_TIMEOUT_S: Final = 300.0


class RunsRollouts(Protocol):
    """An environment."""

    async def run(self, plans: Sequence[RolloutPlan], /) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRun:
    """Clients of a running system: environment, weight updater, and whoever ends the run."""

    client: httpx.AsyncClient
    proxy_url: str
    orchestrator_url: str
    feed_url: str
    engine_urls: Mapping[str, str]  # by the name that the proxy has for it
    headers: dict[str, str] = field(default_factory=dict)
    watch: Callable[[], None] = lambda: None  # raises when a process died
    is_stubborn: bool = False  # services may die, and come back
    applied: int = 0

    async def run(self, environment: RunsRollouts, plans: Sequence[RolloutPlan]) -> None:
        """Roll out everything and train on it. Raises RunStopped, RequestRefused."""
        updater = asyncio.create_task(self._update_weights())
        try:
            await self._while_updating(updater, environment.run(plans))
            await self._post(f"{self.orchestrator_url}/v1/admin/drain")
            await self._while_updating(updater, self._ended())
        finally:
            updater.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await updater

    async def _while_updating(self, updater: "asyncio.Task[None]", work: Awaitable[None]) -> None:
        """``work``, unless the updater fails first: then its error."""
        task = asyncio.ensure_future(work)
        await asyncio.wait({task, updater}, return_when=asyncio.FIRST_COMPLETED)
        if updater.done() and not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            updater.result()
        await task

    async def _update_weights(self) -> None:
        """When all ranks have committed a step, its weights go to every engine, then the proxy."""
        while True:
            self.watch()
            answer = await self._get(f"{self.feed_url}/v1/acknowledgements")
            committed = max(self.applied, int(answer["committed_step"] or 0))
            for name in await self._behind(committed):
                await self._post(
                    f"{self.engine_urls[name]}/update_weight_version",
                    {"weight_version": str(committed)},
                )
                body = {"policy_version": committed, "engines": [name]}
                await self._post(f"{self.proxy_url}/v1/policy-version", body)
            self.applied = committed
            await asyncio.sleep(POLL_S)

    async def _behind(self, version: int) -> list[str]:
        """Engines without ``version``: a new step, or an engine or a proxy that was restarted."""
        if not version:
            return []
        known = await self._get(f"{self.proxy_url}/v1/policy-version")
        behind = {name for name, its in known["engines"].items() if its < version}
        for name, url in self.engine_urls.items():
            if self.is_stubborn and name not in behind:
                its = await self._get(f"{url}/weight_version")
                if int(its["weight_version"]) < version:
                    behind.add(name)
        return sorted(behind)

    async def _ended(self) -> None:
        async with asyncio.timeout(END_TIMEOUT_S):
            while True:
                run = await self._get(f"{self.orchestrator_url}/v1/run")
                if run["phase"] == "ended":
                    return
                if run["phase"] == "stopped" or run["feed_failure"]:
                    raise RunStopped(run["reason"] or run["feed_failure"])
                await asyncio.sleep(POLL_S)

    async def _get(self, url: str) -> dict[str, Any]:
        return await self._ask("GET", url)

    async def _post(self, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return await self._ask("POST", url, body)

    async def _ask(self, method: str, url: str, body: dict[str, Any] | None = None) -> Json:
        async with asyncio.timeout(END_TIMEOUT_S):
            while True:
                try:
                    answer = await self.client.request(method, url, json=body, headers=self.headers)
                except httpx.TransportError:
                    if not self.is_stubborn:
                        raise
                else:
                    if not (self.is_stubborn and answer.status_code == 503):
                        found: Json = checked(answer).json()
                        return found
                await asyncio.sleep(POLL_S)
