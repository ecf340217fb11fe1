"""``RankFeed``: what a trainer rank imports. Steps and micro batches of one rank, in order, once.

Three kinds of threads, all joined by ``close``: one owns the socket (``link.py``), one assembles
the next micro batches while the trainer works on this one, and a pool reads rows.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from uuid import uuid4

from sideband.batch.types import Align
from sideband.feed.assembly import Assembler, View
from sideband.feed.curve import rank_keys
from sideband.feed.errors import FeedTimeout, StepUnfinished, WrongProcess
from sideband.feed.keys import RankKeys
from sideband.feed.layers import Fill
from sideband.feed.link import RankLink
from sideband.feed.messages import HelloMessage
from sideband.feed.micro_batch import RankMicroBatch
from sideband.feed.pool import ReadPool
from sideband.feed.prefetch import Prefetcher
from sideband.feed.reads import RetryPlan, RowSource
from sideband.feed.resume import ResumePoint, restored_point
from sideband.feed.session import RankSession
from sideband.ids import RunId
from sideband.model import ModelShape
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot

FAIL_TIMEOUT_S: Final = 5.0  # how long close() waits until a failure is known to the feed


class RankFeed:
    """Iterate it for steps, iterate a step for micro batches, then commit the step.

    ``resume``: what the checkpoint kept that this trainer restored (``RankStep.resume_point``); the
    feed refuses one that holds steps which the run took back. ``committed_step``: the last step
    whose optimizer step this trainer holds, where it kept no more: it is taken by its number. None
    of either takes what the feed remembers.
    ``global_rank`` may be left out where there are no tensor or pipeline siblings.
    ``layers``: decoder layer ids of a pipeline stage; ``all_layers``: a column for each of them.
    ``credit``: micro batches that may wait undecoded; ``prefetch``: those assembled ahead.
    ``keys``: what `sideband keys` made; an address beyond loopback needs them, unless
    ``plain_beyond_loopback`` says that its network is to be trusted.

    Making it raises InvalidInput. Iterating raises StepFailed (some rank gave the step up),
    RankReadFailed (this rank did), RankRefused, StepMissing, ModelMismatch, FeedTimeout after
    ``step_timeout_s`` without a micro batch or ``join_timeout_s`` without a welcome. It stops when
    the orchestrator ended the run.
    Not thread-safe, and must be made in the process that uses it: WrongProcess after a fork.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        dp_rank: int,
        cp_rank: int,
        global_rank: int | None = None,
        payload_root: Path | str | None = None,
        run_id: RunId | str | None = None,
        committed_step: int | None = None,
        resume: Mapping[str, object] | None = None,
        model: ModelShape | None = None,
        align: Align = "next",
        layers: Sequence[int] | None = None,
        all_layers: bool = False,
        fill: Fill = "zeros",
        threads: int = 32,
        prefetch: int = 2,
        credit: int = 8,
        retry: RetryPlan | None = None,
        step_timeout_s: float = 1800.0,
        join_timeout_s: float = 120.0,
        commit_timeout_s: float = 60.0,
        peer_timeout_s: float = 10.0,
        keys: RankKeys | None = None,
        plain_beyond_loopback: bool = False,
    ) -> None:
        loaded = rank_keys(endpoint, keys, plain_beyond_loopback=plain_beyond_loopback)
        point = restored_point(resume, run_id=run_id, committed_step=committed_step)
        self._pid = os.getpid()
        self._step_timeout_s, self._join_timeout_s = step_timeout_s, join_timeout_s
        self._commit_timeout_s = commit_timeout_s
        self._payload_root = None if payload_root is None else Path(payload_root)
        self._reader: PayloadReader | None = None
        hello = HelloMessage(
            instance=uuid4().hex,
            run_id=run_id if point is None else point.run_id,
            global_rank=global_rank,
            dp_rank=dp_rank,
            cp_rank=cp_rank,
            committed_step=committed_step if point is None else point.step,
            committed_lineage=None if point is None else point.lineage,
            credit=credit,
            model=model,
        )
        session = RankSession(hello=hello, peer_timeout_s=peer_timeout_s)
        self._link = RankLink(endpoint, session, keys=loaded)
        self._pool = ReadPool(threads)
        chosen = None if layers is None else tuple(layers)
        view = View(align=align, layers=chosen, all_layers=all_layers, fill=fill, model=model)
        assembler = Assembler(
            view, pool=self._pool, retry=retry or RetryPlan(), make_source=self._open_source
        )
        self._prefetcher = Prefetcher(self._link, assembler, ahead_max=prefetch)
        self._current: RankStep | None = None
        self._is_closed = False
        self._link.start()
        self._prefetcher.start()

    def _open_source(self, run_id: RunId, model: ModelShape) -> RowSource | None:
        if self._payload_root is None:
            return None
        root = PayloadRoot.open(self._payload_root, run_id=run_id)
        self._reader = PayloadReader(root, model=model)
        return self._reader

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise WrongProcess(made_in=self._pid, used_in=os.getpid())

    @property
    def run_id(self) -> RunId | None:
        """The run that the feed serves; None before the welcome."""
        self._require_own_process()
        run_id = self._link.look(lambda session: session.run_id)
        return None if run_id is None else RunId(run_id)

    @property
    def committed_step(self) -> int | None:
        """The last committed step that this rank knows of."""
        self._require_own_process()
        return self._link.look(lambda session: session.committed)

    def __iter__(self) -> Iterator["RankStep"]:
        while True:
            if self._current is not None:
                self._current.require_finished()
            first = self.next_micro_batch()
            if first is None:
                return
            self._current = RankStep(self, first)
            yield self._current

    def next_micro_batch(self) -> RankMicroBatch | None:
        """The next one over all steps; None after the last. Raises as iterating does."""
        self._require_own_process()
        if self._link.look(lambda session: session.welcome) is None:
            self._link.wait(
                lambda session: session.welcome, "the welcome", timeout_s=self._join_timeout_s
            )
        return self._prefetcher.next(timeout_s=self._step_timeout_s)

    def commit(self, step: int) -> None:
        """Say that the optimizer step is done; returns when the feed has recorded it.

        Raises StepFailed when the step failed meanwhile, FeedTimeout without an answer.
        """
        self._require_own_process()
        self._link.act(lambda session: session.want_commit(step))
        self._link.wait(
            lambda session: (session.committed or 0) >= step or None,
            f"the confirmation of step {step}",
            timeout_s=self._commit_timeout_s,
        )

    def close(self) -> None:
        """Leave the feed and join all threads. A failure of this rank is told first. Idempotent.

        Does nothing in a fork: the feed is the other process's.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        with contextlib.suppress(FeedTimeout):  # the feed is gone: then it hears of us by silence
            self._link.wait(_is_failure_known, "an abort", timeout_s=FAIL_TIMEOUT_S, is_final=True)
        self._pool.close()
        self._link.close()
        self._prefetcher.join()
        if self._reader is not None:
            self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _is_failure_known(session: RankSession) -> bool | None:
    """Nothing to tell, or told."""
    is_open = session.wanted_fail is not None and session.welcome is not None
    return None if is_open and not session.is_aborted and not session.is_out else True


class RankStep:
    """One step: iterate it once for its micro batches, then ``commit``."""

    def __init__(self, feed: RankFeed, first: RankMicroBatch) -> None:
        self.step = first.step
        self.run_id = first.run_id
        self.resume_point: ResumePoint = first.resume_point  # to keep with the weights it gives
        self._feed = feed
        self._first: RankMicroBatch | None = first
        self._count = first.count
        self._taken = 0

    def __len__(self) -> int:
        """Micro batches in the step, equal on all ranks."""
        return self._count

    def __iter__(self) -> Iterator[RankMicroBatch]:
        while self._taken < self._count:
            batch = self._feed.next_micro_batch() if self._first is None else self._first
            self._first = None
            assert batch is not None, "END follows the last micro batch of a step"
            assert batch.step == self.step, "the session keeps the order"
            self._taken += 1
            yield batch

    def require_finished(self) -> None:
        """Raises StepUnfinished unless every micro batch was taken."""
        if self._taken < self._count:
            raise StepUnfinished(self.step, taken=self._taken, count=self._count)

    def commit(self) -> None:
        """As ``RankFeed.commit``. Raises StepUnfinished too."""
        self.require_finished()
        self._feed.commit(self.step)
