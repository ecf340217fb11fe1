"""Threads that read: daemons, so that a hung filesystem cannot hold up a trainer's exit.

``concurrent.futures`` joins its threads at exit whatever they wait for; a ``pread`` on a dead
network filesystem waits for ever.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sideband.errors import SidebandError
from sideband.feed.errors import FeedClosed, FeedTimeout

JOIN_TIMEOUT_S: Final = 5.0

Job = Callable[[], None]


@dataclass(eq=False, slots=True)
class _Round:
    """One call of ``run``: what is still open, and the first error."""

    open_count: int
    error: Exception | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def is_over(self) -> bool:
        return self.open_count == 0 or self.error is not None


class ReadPool:
    """A fixed number of threads that run jobs. Start means ready; ``close`` joins, bounded."""

    def __init__(self, thread_count: int) -> None:
        self._jobs: queue.SimpleQueue[tuple[_Round, Job] | None] = queue.SimpleQueue()
        self.closing = threading.Event()  # jobs that wait must watch it
        self._threads = [
            threading.Thread(target=self._work, name=f"sideband-read-{i}", daemon=True)
            for i in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, jobs: Sequence[Job], *, timeout_s: float) -> None:
        """Run all jobs; return when all are done. One caller at a time.

        Raises the first error of a job (the others are skipped or finish unseen), FeedTimeout
        after ``timeout_s``, FeedClosed when the pool closes.
        """
        if not jobs:
            return
        turn = _Round(len(jobs))
        for job in jobs:
            self._jobs.put((turn, job))
        deadline_s = time.monotonic() + timeout_s
        with turn.changed:
            while not turn.is_over():
                if self.closing.is_set():
                    turn.error = FeedClosed("the feed was closed while rows were read")
                    break
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    turn.error = FeedTimeout(
                        f"{turn.open_count} reads of {len(jobs)}", waited_s=timeout_s
                    )
                    break
                turn.changed.wait(min(left_s, 1.0))
            error = turn.error
        if error is not None:
            raise error

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            turn, job = item
            if turn.error is not None or self.closing.is_set():
                continue
            # Stands when the job dies of a bug: its trace goes to the thread's excepthook.
            error: Exception | None = RuntimeError("a read job crashed")
            try:
                job()
                error = None
            except SidebandError as exc:
                error = exc  # raised again in the thread that waits
            finally:
                with turn.changed:
                    turn.open_count -= 1
                    turn.error = turn.error or error
                    if turn.is_over():
                        turn.changed.notify_all()

    def close(self) -> None:
        """Stop the threads. One that hangs in a read is left behind: it is a daemon."""
        self.closing.set()
        for _ in self._threads:
            self._jobs.put(None)
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
