"""Whether new requests are taken: open, paused (may resume) or draining to a terminal state."""

import asyncio
from typing import Literal

GateState = Literal["open", "paused", "draining", "drained"]


class NotTaken(Exception):
    """The gate is not open; ``state`` says why."""

    def __init__(self, state: GateState) -> None:
        self.state = state
        super().__init__(f"the proxy is {state}: it takes no new requests")


class Gate:
    """Counts what runs; ``drain`` ends within its deadline whatever the engines do."""

    def __init__(self) -> None:
        self.state: GateState = "open"
        self.in_flight = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def enter(self) -> "Counted":
        """One request. Raises NotTaken."""
        if self.state != "open":
            raise NotTaken(self.state)
        return Counted(self)

    def counted(self) -> "Counted":
        """One that was taken already: a stream outlives the call that opened it."""
        return Counted(self)

    def begin(self) -> None:
        """A request runs from here on."""
        self.in_flight += 1
        self._empty.clear()

    def end(self) -> None:
        """It came to its end."""
        self.in_flight -= 1
        if not self.in_flight:
            self._empty.set()

    def pause(self) -> None:
        """Take no new requests; those that run go on."""
        if self.state == "open":
            self.state = "paused"

    def resume(self) -> None:
        """Take requests again, also after a drain."""
        self.state = "open"

    def begin_drain(self) -> None:
        """Take no new requests, for good unless somebody resumes."""
        self.state = "draining"

    async def drain(self, *, timeout_s: float) -> bool:
        """Take no new requests and wait for those that run. False when the deadline came first."""
        self.begin_drain()
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        if self.state == "draining":
            self.state = "drained"
        return True


class Counted:
    """Counts a request while the block runs."""

    __slots__ = ("_gate",)

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __enter__(self) -> None:
        self._gate.begin()

    def __exit__(self, *_: object) -> None:
        self._gate.end()
