"""Assembles micro batches ahead of the trainer, one thread, a bounded number ahead.

What is assembled is handed out only when the feed has released it: every rank has read it, so no
rank enters a collective that another cannot.
"""

import threading
from collections import deque
from functools import partial
from typing import Final

from sideband.errors import FeedError, SidebandError
from sideband.feed.assembly import Assembler
from sideband.feed.errors import FeedClosed, FeedTimeout
from sideband.feed.facts import after
from sideband.feed.link import RankLink
from sideband.feed.messages import Header
from sideband.feed.micro_batch import RankMicroBatch
from sideband.feed.session import Arrived, RankSession

IDLE_S: Final = 60.0  # an idle assembler looks around once a minute; the trainer has the deadline
JOIN_TIMEOUT_S: Final = 5.0


class Prefetcher:
    """Owns the assembling thread. Its state lives under the link's lock."""

    def __init__(self, link: RankLink, assembler: Assembler, *, ahead_max: int) -> None:
        self._link, self._assembler, self._ahead_max = link, assembler, ahead_max
        self._ready: deque[RankMicroBatch] = deque()
        self._current: Arrived | None = None
        self._thread = threading.Thread(
            target=self._run, name="sideband-feed-assembler", daemon=True
        )

    def start(self) -> None:
        """Begin to assemble. Once."""
        self._thread.start()

    def join(self) -> None:
        """After the link and the pool have closed."""
        self._thread.join(JOIN_TIMEOUT_S)

    def next(self, *, timeout_s: float) -> RankMicroBatch | None:
        """The next released micro batch, None after the last. Raises as ``RankFeed`` says."""
        found = self._link.wait(self._pop, "the next micro batch", timeout_s=timeout_s)
        self._link.act(lambda _: [])  # there is room ahead again
        return found[0]

    def _pop(self, session: RankSession) -> tuple[RankMicroBatch | None] | None:
        if self._ready:
            first = self._ready[0]
            is_released = (first.step, first.index) < session.released
            return (self._ready.popleft(),) if is_released else None
        if session.is_ended and not session.arrived and self._current is None:
            return (None,)
        return None

    def _run(self) -> None:
        # Stands when the thread dies of a bug: its trace goes to the thread's excepthook.
        error: SidebandError | None = FeedError("the assembling thread crashed")
        try:
            self._assemble_all()
        except FeedClosed:
            error = None
        except SidebandError as exc:
            error = exc
        finally:
            if error is not None:
                current = self._current
                self._link.fail(error, step=None if current is None else current.message.step)

    def _assemble_all(self) -> None:
        while True:
            arrived = self._take()
            if arrived is None:
                continue
            batch = self._assembler.assemble(arrived.message, arrived.body)
            self._link.act(partial(self._done, batch))

    def _done(self, batch: RankMicroBatch, session: RankSession) -> list[Header]:
        self._ready.append(batch)
        self._current = None
        session.note_read(after((batch.step, batch.index), batch.count))
        return []

    def _take(self) -> Arrived | None:
        """The oldest arrived micro batch, once there is room; None to look around."""

        def has_work(session: RankSession) -> bool | None:
            return (bool(session.arrived) and len(self._ready) < self._ahead_max) or None

        try:
            self._link.wait(has_work, "a micro batch to assemble", timeout_s=IDLE_S)
        except FeedTimeout:
            return None
        self._link.act(self._claim)
        return self._current

    def _claim(self, session: RankSession) -> list[Header]:
        self._current = session.take()
        return []
