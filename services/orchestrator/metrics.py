"""Metrics of the orchestrator.

| metric | labels |
| --- | --- |
| orchestrator_leases_total | state |
| orchestrator_rollouts_total | state |
| orchestrator_rollouts_dropped_total | reason |
| orchestrator_rollouts_refused_total | code |
| orchestrator_samples_total, orchestrator_samples_truncated_total | |
| orchestrator_samples_untrainable_total | |
| orchestrator_samples_with_holes_total | |
| orchestrator_routing_rows_missing_total, orchestrator_routing_rows_invalid_total | |
| orchestrator_masks_missing_total | |
| orchestrator_steps_total | state |
| orchestrator_step_bytes | |
| orchestrator_step_routing_valid_fraction, orchestrator_step_mask_valid_fraction | |
| orchestrator_delivery_failures_total, orchestrator_steps_resent_total | |
| orchestrator_files_deleted_total, orchestrator_deleted_bytes_total | cause |
| orchestrator_delete_failures_total, orchestrator_deletions_pending | |
| orchestrator_storage_full, orchestrator_storage_refusals_total | |
| orchestrator_storage_free_bytes, orchestrator_storage_used_bytes | |
| orchestrator_ledger_commits_total, orchestrator_ledger_changes_total | |
| orchestrator_ledger_commit_seconds | |
| orchestrator_ledger_pending, orchestrator_terms_total | |
| orchestrator_loop_delay_seconds, orchestrator_loop_delay_max_seconds | |
| orchestrator_loop_busy_max_seconds | |
| orchestrator_leases_open, orchestrator_rollouts_held, orchestrator_files_held | |
| orchestrator_policy_version, orchestrator_next_step, orchestrator_phase | (phase) |

Labels are states, reasons and codes of this service: their number is bounded.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.kit.loop_watch import LoopMetrics
from services.orchestrator.book import Book
from services.orchestrator.lifecycle import Phase
from services.orchestrator.records import (
    Change,
    LeaseState,
    Rollout,
    RolloutState,
    StepRecord,
    StepState,
)

COMMIT_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Metrics:
    """One object, made by the app. ``observe`` counts a committed change."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"orchestrator_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"orchestrator_{name}", text, labels, registry=registry)

        self.leases_total = counter("leases_total", "Leases that entered a state.", "state")
        self.rollouts_total = counter("rollouts_total", "Rollouts that entered a state.", "state")
        self.dropped_total = counter("rollouts_dropped_total", "Rollouts dropped.", "reason")
        self.refused_total = counter("rollouts_refused_total", "Rollouts refused.", "code")
        self.samples_total = counter("samples_total", "Samples of delivered rollouts.")
        self.truncated_total = counter("samples_truncated_total", "Samples cut to seq_len.")
        self.untrainable_total = counter("samples_untrainable_total", "Samples without loss.")
        self.holes_total = counter("samples_with_holes_total", "Samples with a routing hole.")
        self.rows_missing_total = counter("routing_rows_missing_total", "Rows that do not train.")
        self.rows_invalid_total = counter("routing_rows_invalid_total", "Rows left out by engines.")
        self.masks_missing_total = counter("masks_missing_total", "Trained tokens without a mask.")
        self.steps_total = counter("steps_total", "Steps that entered a state.", "state")
        self.step_bytes = gauge("step_bytes", "Size of the last step's body.")
        self.routing_valid = gauge("step_routing_valid_fraction", "Of the last step.")
        self.mask_valid = gauge("step_mask_valid_fraction", "Of the last step.")
        self.delivery_failures_total = counter("delivery_failures_total", "Failed calls of feed.")
        self.steps_resent_total = counter("steps_resent_total", "Steps that the feed had lost.")
        self.files_deleted_total = counter("files_deleted_total", "Files deleted.", "cause")
        self.deleted_bytes_total = counter("deleted_bytes_total", "Bytes deleted.", "cause")
        self.delete_failures_total = counter("delete_failures_total", "Failed attempts to delete.")
        self.deletions_pending = gauge("deletions_pending", "Files given up and still there.")
        self.storage_full = gauge("storage_full", "1 while the root is too full for new work.")
        self.storage_refusals_total = counter("storage_refusals_total", "Requests refused for it.")
        self.storage_free_bytes = gauge("storage_free_bytes", "Free space of the payload root.")
        self.storage_used_bytes = gauge("storage_used_bytes", "Bytes of the run's payload files.")
        self.ledger_commits_total = counter("ledger_commits_total", "Commits of the ledger.")
        self.ledger_changes_total = counter("ledger_changes_total", "Changes made durable.")
        self.ledger_commit_seconds = Histogram(
            "orchestrator_ledger_commit_seconds",
            "Time of one commit.",
            buckets=COMMIT_BUCKETS_S,
            registry=registry,
        )
        self.ledger_pending = gauge("ledger_pending", "Changes that are not durable yet.")
        self.loop = LoopMetrics(registry, "orchestrator")
        self.terms_total = counter("terms_total", "Times that this process began to lead.")
        self.leases_open = gauge("leases_open", "Open leases.")
        self.rollouts_held = gauge("rollouts_held", "Rollouts that wait for a step.")
        self.files_held = gauge("files_held", "Files that something keeps.")
        self.policy_version = gauge("policy_version", "Least version over serving engines.")
        self.next_step = gauge("next_step", "The step that is collected for.")
        self.phase = gauge("phase", "1 for the phase of the run.", "phase")

    def committed(self, changes: int, seconds: float) -> None:
        """One commit of the ledger."""
        self.ledger_commits_total.inc()
        self.ledger_changes_total.inc(changes)
        self.ledger_commit_seconds.observe(seconds)

    def watch(self, book: Book, pending: Callable[[], int]) -> None:
        """Gauges that read the book of a new term when they are asked."""
        self.terms_total.inc()
        self.ledger_pending.set_function(pending)
        self.leases_open.set_function(lambda: len(book.open_leases))
        self.rollouts_held.set_function(lambda: len(book.held))
        self.files_held.set_function(lambda: book.retention.held_count)
        self.policy_version.set_function(lambda: -1 if (k := book.policy_version) is None else k)
        self.next_step.set_function(lambda: book.next_step)
        for phase in Phase:
            self.phase.labels(phase.value).set_function(_is_phase(book, phase))

    def observe(self, change: Change) -> None:
        """Count what a change did."""
        for lease in change.leases:
            if lease.state is not LeaseState.OPEN:  # a renewal is no new lease
                self.leases_total.labels(lease.state.value).inc()
        for rollout in change.rollouts:
            self._rollout(rollout)
        for record in change.steps:
            self.steps_total.labels(record.state.value).inc()
            if record.state is StepState.BUILT and record.body:
                self._built(record)

    def delivered(self, rollout: Rollout) -> None:
        """Count what was found in a body, once per delivered rollout."""
        tally = rollout.tally
        self.samples_total.inc(tally.samples)
        self.truncated_total.inc(tally.samples_truncated)
        self.untrainable_total.inc(tally.samples_untrainable)
        self.holes_total.inc(tally.samples_with_holes)
        self.rows_missing_total.inc(tally.routing_positions - tally.routing_rows)
        self.rows_invalid_total.inc(tally.rows_invalid)
        self.masks_missing_total.inc(tally.mask_positions - tally.mask_rows)
        if rollout.refusal is not None:
            self.refused_total.labels(rollout.refusal).inc()

    def _rollout(self, rollout: Rollout) -> None:
        self.rollouts_total.labels(rollout.state.value).inc()
        if rollout.state is RolloutState.DROPPED and rollout.reason is not None:
            self.dropped_total.labels(rollout.reason.value).inc()

    def _built(self, record: StepRecord) -> None:
        self.step_bytes.set(record.size_bytes)
        self.routing_valid.set(record.tally.routing_valid_fraction)
        self.mask_valid.set(record.tally.mask_valid_fraction)


def _is_phase(book: Book, phase: Phase) -> Callable[[], float]:
    return lambda: float(book.run.phase is phase)
