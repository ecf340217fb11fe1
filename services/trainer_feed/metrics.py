"""Metrics of the feed.

| metric | labels |
| --- | --- |
| feed_steps_accepted_total, feed_steps_committed_total, feed_steps_failed_total | |
| feed_step_body_bytes_total | |
| feed_steps_held, feed_committed_step | |
| feed_micro_batches_sent_total, feed_sent_bytes_total | |
| feed_ranks_expected, feed_ranks_connected | |
| feed_rank_joins_total, feed_ranks_lost_total | |
| feed_blocking_ranks, feed_intake_blocked_total | |
| feed_refusals_total | code |
| feed_peers_denied_total | reason: key, protocol, handshake |
| feed_loop_delay_seconds, feed_loop_delay_max_seconds | |
| feed_loop_busy_max_seconds | |

Codes of refusals are those of docs/feed-protocol.md, so their number is bounded.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.kit.loop_watch import LoopMetrics


class Metrics:
    """One object, made by the app and handed to whoever counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"feed_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"feed_{name}", text, registry=registry)

        self.steps_accepted_total = counter("steps_accepted_total", "Steps taken.")
        self.steps_committed_total = counter("steps_committed_total", "Committed by all ranks.")
        self.steps_failed_total = counter("steps_failed_total", "Given up by a rank, so by all.")
        self.step_body_bytes_total = counter("step_body_bytes_total", "Bytes of step bodies.")
        self.steps_held = gauge("steps_held", "Steps that some rank has not committed.")
        self.committed_step = gauge("committed_step", "Last step that every rank has committed.")
        self.micro_batches_sent_total = counter("micro_batches_sent_total", "Chunks sent.")
        self.sent_bytes_total = counter("sent_bytes_total", "Bytes of chunks sent.")
        self.ranks_expected = gauge("ranks_expected", "Global ranks that the barrier waits for.")
        self.ranks_connected = gauge("ranks_connected", "Global ranks that are there.")
        self.blocking_ranks = gauge(
            "blocking_ranks", "Absent ranks that have not committed the oldest held step."
        )
        self.intake_blocked_total = counter(
            "intake_blocked_total", "Steps refused because a full feed waits for absent ranks."
        )
        self.rank_joins_total = counter("rank_joins_total", "Hellos taken, repeats too.")
        self.ranks_lost_total = counter("ranks_lost_total", "Ranks that went without goodbye.")
        self.refusals_total = counter("refusals_total", "Refused messages of ranks.", "code")
        self.peers_denied_total = counter(
            "peers_denied_total", "Connections that were not let in.", "reason"
        )
        self.loop = LoopMetrics(registry, "feed")
