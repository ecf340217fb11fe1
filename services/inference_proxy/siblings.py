"""The other workers of the same proxy, as admin routes see them. Alone, there are none."""

from typing import Protocol

from services.inference_proxy.schemas import EngineView, Sessions


class Siblings(Protocol):
    """What is asked of the others: only the leader does, behind its admin routes.

    Every call may raise WorkerSilent, a problem: an answer about all is right, or it is an error.
    """

    async def publish(self) -> None:
        """What was changed here holds in every worker once this returns."""

    async def begin(self) -> None:
        """The version on record is known here: returns when it holds in every worker."""

    def applied(self, own: int) -> int:
        """What is applied in every worker, where ``own`` is in this one: nobody is told earlier."""

    async def drain(self, *, timeout_s: float) -> bool:
        """The others take nothing new; whether nothing runs there any more."""

    async def in_flight(self) -> int:
        """Requests that run there."""

    async def engines(self, own: list[EngineView]) -> list[EngineView]:
        """Engines as all workers together see them."""

    async def sessions(self, own: Sessions, *, limit: int) -> Sessions:
        """Sessions of all, at most ``limit``, the latest of each worker last."""

    async def not_ready(self) -> list[str]:
        """Why the others cannot serve. Raises nothing: silence is a reason."""

    async def scraped(self, own: bytes) -> bytes:
        """Metrics of all."""

    async def run(self) -> None:
        """Tell the others of what changes by itself, until cancelled."""


class Alone:
    """One worker: all there is to say is its own."""

    async def publish(self) -> None:
        """Nobody has to know."""

    async def begin(self) -> None:
        """It does."""

    def applied(self, own: int) -> int:
        """The same."""
        return own

    async def drain(self, *, timeout_s: float) -> bool:
        """Nothing runs elsewhere."""
        return True

    async def in_flight(self) -> int:
        """None elsewhere."""
        return 0

    async def engines(self, own: list[EngineView]) -> list[EngineView]:
        """As they are."""
        return own

    async def sessions(self, own: Sessions, *, limit: int) -> Sessions:
        """As they are."""
        return own

    async def not_ready(self) -> list[str]:
        """No reason."""
        return []

    async def scraped(self, own: bytes) -> bytes:
        """As they are."""
        return own

    async def run(self) -> None:
        """Nothing to tell."""
