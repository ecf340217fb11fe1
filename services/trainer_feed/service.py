"""What the feed shows and how it drains: the part between HTTP and the library's server."""

import time
from collections.abc import Callable
from typing import Final
from uuid import uuid4

import structlog

from services.trainer_feed.errors import FeedRestarted, UnknownStep
from services.trainer_feed.schemas import (
    Acknowledgements,
    FailureView,
    FeedState,
    FeedView,
    RankCommit,
    RanksView,
    RankView,
    StepsView,
    StepView,
    WentBack,
)
from sideband.feed.facts import GoneBack, RankState
from sideband.feed.server import FeedServer, PutReceipt
from sideband.feed.waiting import uncommitted

RANKS_SHOWN_MAX: Final = 1024
log = structlog.get_logger(__name__)


class FeedService:
    """One running feed. All methods on its event loop."""

    def __init__(self, server: FeedServer, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._server, self._clock = server, clock
        self._delivery = server.delivery
        self.instance = uuid4().hex  # fresh whenever steps that were held are not any more

    def check_instance(self, expected: str | None) -> None:
        """Raise FeedRestarted unless the caller means this process, or any."""
        if expected is not None and expected != self.instance:
            raise FeedRestarted(
                f"The feed is {self.instance} now: what {expected} held is gone.",
                feed_instance=self.instance,
            )

    async def put(self, body: bytes, *, step: int, lineage: int) -> PutReceipt:
        """Take a step that began to come in ``lineage``. Idempotent.

        Raises what ``FeedServer.put`` does.
        """
        return await self._server.put(body, step=step, lineage=lineage)

    def steps(self) -> StepsView:
        """All held steps."""
        held = self._delivery.held
        return StepsView(
            steps=[self.step(step) for step in held.steps],
            last_step=held.last_step,
            steps_held_max=self._delivery.plan.steps_held_max,
            feed_instance=self.instance,
            lineage=self.lineage,
        )

    def step(self, step: int) -> StepView:
        """One held step. Raises UnknownStep."""
        facts = self._delivery.held.get(step)
        if facts is None:
            raise UnknownStep(f"step {step} is not held", step=step)
        missing = uncommitted(self._delivery, step)
        return StepView(
            step=step,
            micro_batch_count=facts.count,
            digest=facts.digest,
            uncommitted_ranks=list(missing[:RANKS_SHOWN_MAX]),
        )

    def ranks(self) -> RanksView:
        """Every global rank, there or not."""
        count = self._delivery.plan.rank_count
        return RanksView(
            ranks=[self._rank(rank) for rank in range(min(count, RANKS_SHOWN_MAX))],
            expected=count,
            waiting_for=self._waiting_for(),
            generation=self._delivery.generation,
        )

    def _rank(self, global_rank: int) -> RankView:
        committed = self._delivery.committed.get(global_rank)
        rank: RankState | None = self._delivery.ranks.get(global_rank)
        if rank is None:
            return RankView(
                global_rank=global_rank,
                is_connected=False,
                dp_rank=None,
                cp_rank=None,
                instance=None,
                seen_s_ago=None,
                delivered=None,
                read=None,
                credit_left=None,
                committed_step=committed,
            )
        return RankView(
            global_rank=global_rank,
            is_connected=rank.connection is not None,
            dp_rank=rank.dp_rank,
            cp_rank=rank.cp_rank,
            instance=rank.instance,
            seen_s_ago=round(max(0.0, self._clock() - rank.last_seen_s), 3),
            delivered=rank.next,
            read=rank.read,
            credit_left=rank.credit - (rank.seq_sent - rank.seq_taken),
            committed_step=committed,
        )

    def acknowledgements(self) -> Acknowledgements:
        """What is done, and what failed."""
        delivery, failure = self._delivery, self._delivery.failure
        return Acknowledgements(
            run_id=delivery.plan.run_id,
            committed_step=delivery.committed_step,
            last_step=delivery.held.last_step,
            ranks=[
                RankCommit(global_rank=rank, committed_step=step)
                for rank, step in sorted(delivery.committed.items())[:RANKS_SHOWN_MAX]
            ],
            failed=None
            if failure is None
            else FailureView(step=failure.step, global_rank=failure.rank, reason=failure.reason),
            feed_instance=self.instance,
            lineage=self.lineage,
        )

    @property
    def lineage(self) -> int:
        """How often the trainer went back, as told."""
        gone_back = self._delivery.lineage.gone_back
        return 0 if gone_back is None else gone_back.lineage

    def go_back(self, to: GoneBack) -> WentBack:
        """The trainer went back. A step on its way here was meant for what was held before."""
        is_known = to.lineage == self.lineage
        dropped = self._server.go_back(to)
        if not is_known:
            self.instance = uuid4().hex
            log.warning("trainer_went_back", lineage=to.lineage, step=to.step, dropped=dropped)
        return WentBack(
            lineage=to.lineage,
            step=to.step,
            steps_dropped=list(dropped),
            feed_instance=self.instance,
        )

    def end(self) -> FeedView:
        """No more steps will come."""
        self._server.end()
        return self.view()

    def reopen(self) -> FeedView:
        """More steps will come after all."""
        self._server.reopen()
        return self.view()

    def pause(self, *, is_paused: bool) -> FeedView:
        """Neither take nor send; commits still count."""
        self._server.pause(is_paused=is_paused)
        return self.view()

    async def drain(self, *, timeout_s: float) -> FeedView:
        """End, then wait until every rank has committed everything, at most ``timeout_s``."""
        self._server.end()
        is_complete = await self._server.drained(timeout_s=timeout_s)
        return self.view(is_complete=is_complete)

    def view(self, *, is_complete: bool | None = None) -> FeedView:
        """Where the feed stands."""
        return FeedView(
            state=self._state(),
            steps_held=list(self._delivery.held.steps),
            waiting_for=self._waiting_for(),
            is_complete=self._delivery.is_drained if is_complete is None else is_complete,
        )

    def _state(self) -> FeedState:
        delivery = self._delivery
        if delivery.is_drained:
            return "drained"
        if delivery.failure is not None:
            return "failed"
        if delivery.held.is_paused:
            return "paused"
        if delivery.held.is_ended:
            return "ending"
        return "streaming" if delivery.is_open else "waiting_for_ranks"

    def _waiting_for(self) -> list[int]:
        return list(self._delivery.waiting_for()[:RANKS_SHOWN_MAX])
