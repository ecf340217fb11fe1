"""The feed's events as log lines and metrics."""

from collections.abc import Sequence

import structlog

from services.trainer_feed.metrics import Metrics
from sideband.feed.delivery import Delivery
from sideband.feed.facts import RankState
from sideband.feed.observer import FeedObserver
from sideband.feed.waiting import blocking

log = structlog.get_logger(__name__)


class FeedEvents(FeedObserver):
    """Called on the event loop by the feed's server."""

    def __init__(self, delivery: Delivery, metrics: Metrics) -> None:
        self._metrics, self._delivery, self._held = metrics, delivery, delivery.held
        self._blocking: tuple[int, ...] = ()
        metrics.blocking_ranks.set_function(lambda: len(blocking(delivery)))
        metrics.ranks_expected.set(delivery.plan.rank_count)
        metrics.steps_held.set_function(lambda: len(delivery.held.steps))
        metrics.committed_step.set_function(lambda: delivery.committed_step or 0)
        metrics.ranks_connected.set_function(
            lambda: sum(rank.connection is not None for rank in delivery.ranks.values())
        )

    def step_accepted(self, step: int, *, micro_batch_count: int, body_bytes: int) -> None:
        """A step is held."""
        self._blocking = ()
        self._metrics.steps_accepted_total.inc()
        self._metrics.step_body_bytes_total.inc(body_bytes)
        log.info(
            "step_accepted", step=step, micro_batch_count=micro_batch_count, body_bytes=body_bytes
        )

    def step_committed(self, step: int) -> None:
        """Every rank has committed the step."""
        self._metrics.steps_committed_total.inc()
        log.info("step_committed", step=step)

    def intake_blocked(self, ranks: Sequence[int]) -> None:
        """The alarm of a full feed names who is gone; once until somebody else is."""
        self._metrics.intake_blocked_total.inc()
        if tuple(ranks) != self._blocking:
            self._blocking = tuple(ranks)
            log.error("intake_blocked", ranks=list(ranks), steps_held=len(self._held.steps))

    def step_failed(self, step: int, *, rank: int, reason: str) -> None:
        """A rank gave the step up, so all do."""
        self._metrics.steps_failed_total.inc()
        log.error("step_failed", step=step, global_rank=rank, reason=reason)

    def rank_joined(self, rank: RankState) -> None:
        """A rank said hello."""
        self._metrics.rank_joins_total.inc()
        log.info(
            "rank_joined",
            global_rank=rank.global_rank,
            dp_rank=rank.dp_rank,
            cp_rank=rank.cp_rank,
            instance=rank.instance,
            generation=rank.generation,
            waiting_for=self._delivery.waiting_for()[:16],
        )

    def rank_left(self, rank: RankState, *, is_lost: bool) -> None:
        """A rank said goodbye, or fell silent."""
        if is_lost:
            self._metrics.ranks_lost_total.inc()
            log.warning("rank_lost", global_rank=rank.global_rank, instance=rank.instance)
        else:
            log.info("rank_left", global_rank=rank.global_rank, instance=rank.instance)

    def rank_refused(self, code: str, reason: str) -> None:
        """Somebody was not let in, or spoke nonsense."""
        self._metrics.refusals_total.labels(code).inc()
        log.warning("rank_refused", code=code, reason=reason)

    def peers_denied(self, reason: str, count: int) -> None:
        """Connections were not let in."""
        self._metrics.peers_denied_total.labels(reason).inc(count)
        log.warning("peers_denied", reason=reason, count=count)

    def micro_batch_sent(self, rank: RankState, *, step: int, sent_bytes: int) -> None:
        """A chunk is on the way."""
        self._metrics.micro_batches_sent_total.inc()
        self._metrics.sent_bytes_total.inc(sent_bytes)
