"""One reader process, as the service sees it: it is started, asked, and ended."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from typing import Final

import numpy as np

from services.kit.readers.framing import BEGIN, END, GO_ON, PREFIX

# It finds modules where the service does, whatever way that was started.
PROGRAM: Final = (
    "import sys; module, *sys.path = sys.argv[1:]; "
    "from services.kit.readers.child import main; main(module)"
)
PART_BYTES: Final = 256 << 10  # of an answer, taken in one turn of the loop


class ReaderGone(Exception):
    """The process ended before it answered, or never began."""


class Reader:
    """One conversation at a time. Whoever gives up waiting for an answer must end the process."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._in, self._out = process, process.stdin, process.stdout
        self._kind = BEGIN

    @classmethod
    async def start(cls, module: str) -> "Reader":
        """A process that loads ``module``: wait for ``ready`` before it is asked.

        Raises ReaderGone when the system gives none.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", PROGRAM, module, *sys.path),
                stdin=PIPE,
                stdout=PIPE,
                limit=PART_BYTES,
                start_new_session=True,  # a terminal's interrupt is for the service, which ends it
            )
        except OSError as exc:
            raise ReaderGone(f"cannot be started: {exc}") from exc
        return cls(process)

    async def ready(self) -> None:
        """Until it can be asked. Raises ReaderGone."""
        await self._answer()

    async def ask(self, head: bytes, body: deque[bytes]) -> tuple[bytes, memoryview]:
        """The head and the body of the answer; ``body`` is emptied. Raises ReaderGone."""
        size_bytes = sum(map(len, body))
        if self._in.is_closing():
            raise ReaderGone("has ended")
        try:
            self._in.write(PREFIX.pack(self._kind, len(head), size_bytes) + head)
            while body and not self._in.is_closing():
                self._in.write(body.popleft())
                await self._in.drain()
        except OSError as exc:
            raise ReaderGone(str(exc)) from exc
        self._kind = GO_ON
        return await self._answer()

    def end_conversation(self) -> None:
        """The next question begins another one."""
        if not self._in.is_closing():
            self._in.write(PREFIX.pack(END, 0, 0))
        self._kind = BEGIN

    async def _answer(self) -> tuple[bytes, memoryview]:
        try:
            _, head_bytes, body_bytes = PREFIX.unpack(await self._out.readexactly(PREFIX.size))
            head = await self._out.readexactly(head_bytes)
        except asyncio.IncompleteReadError as exc:
            raise ReaderGone("ended before it answered") from exc
        # Not zeroed first: that would touch all of it in one call.
        body: memoryview = np.empty(body_bytes, np.uint8).data
        at = 0
        while at < body_bytes:
            part = await self._out.read(min(PART_BYTES, body_bytes - at))
            if not part:
                raise ReaderGone("ended within an answer")
            body[at : at + len(part)] = part
            at += len(part)
        return head, body.toreadonly()

    @property
    def is_running(self) -> bool:
        """Whether it is not known to have ended."""
        return self._process.returncode is None

    def kill(self) -> None:
        """End it at once; ``ended`` waits for it."""
        if self.is_running:
            self._process.kill()

    async def ended(self) -> None:
        """Until it is gone."""
        self._in.close()
        await self._process.wait()
