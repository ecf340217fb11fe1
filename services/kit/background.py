"""A service's background work: owned from start to stop, and never gone unnoticed.

A service whose work has ended although nobody asked it to would answer and do nothing. So the log
says ``background_crashed``, the service is not ready any more, and its process ends in order with a
status that is not 0: whoever watches it starts another.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import structlog

CRASHED: Final = "a background task crashed"  # to whoever asks for readiness

log = structlog.get_logger(__name__)


class Crash:
    """Called by a service that can do nothing more. Who serves it says how it ends (``ends``)."""

    def __init__(self) -> None:
        self.has_happened = False
        self._end: Callable[[], None] | None = None

    def __call__(self) -> None:
        """End the process, with a status that is not 0."""
        self.has_happened = True
        if self._end is not None:
            self._end()

    def ends(self, end: Callable[[], None]) -> None:
        """``end`` is called once the service has crashed, or now if it has."""
        self._end = end
        if self.has_happened:
            end()

    @property
    def reasons(self) -> list[str]:
        """Why the service is not ready; nothing as long as all is well."""
        return [CRASHED] if self.has_happened else []


@asynccontextmanager
async def background(
    jobs: Sequence[Coroutine[Any, Any, None]],
    *,
    crash: Callable[[], None],
    begun: asyncio.Event | None = None,
    ends_by: tuple[type[Exception], ...] = (),
) -> AsyncIterator[None]:
    """Runs ``jobs`` inside, all of them until one raises; those that return were done.

    Calls ``crash`` when one raises, unless it is ``ends_by``, by which work ends in order. With
    ``begun`` the block is entered once that is set, and what is raised before ends the start.
    """
    is_ending = False

    def ended(task: asyncio.Task[None]) -> None:
        if is_ending:
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        assert error is not None, "the work ends by an error only"
        if not isinstance(error, BaseExceptionGroup) or error.split(ends_by)[1] is not None:
            log.critical("background_crashed", exc_info=error)
            crash()

    task = asyncio.create_task(_together(jobs))
    try:
        if begun is not None:
            await _beginning(task, begun)
        task.add_done_callback(ended)
        yield
    finally:
        is_ending = not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _together(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(job)
        group.create_task(_for_ever())


async def _for_ever() -> None:
    await asyncio.Event().wait()


async def _beginning(task: asyncio.Task[None], begun: asyncio.Event) -> None:
    """Until ``begun`` is set. Raises what ended the task before."""
    waiting = asyncio.create_task(begun.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
    except BaseExceptionGroup as exc:
        if len(exc.exceptions) == 1:
            raise exc.exceptions[0] from None
        raise
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
