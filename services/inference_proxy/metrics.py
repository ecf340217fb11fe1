"""Metrics of the proxy.

| metric | labels |
| --- | --- |
| proxy_generate_total | kind, outcome |
| proxy_attempts_total | engine, leg, outcome |
| proxy_attempt_duration_seconds | leg |
| proxy_engine_in_flight | engine |
| proxy_engine_serving | engine |
| proxy_ejections_total | engine |
| proxy_retries_total | |
| proxy_files_deleted_total, proxy_deleted_bytes_total | reason |
| proxy_delete_failures_total, proxy_deletions_pending | |
| proxy_rows_not_asked_total | |
| proxy_answers_total | kind, form |
| proxy_answer_bytes_total | kind |
| proxy_inline_instead_of_handle_total | |
| proxy_spilled_files_total, proxy_spilled_bytes_total, proxy_spilled_rows_invalid_total | |
| proxy_spill_held_bytes | |
| proxy_kept_turns, proxy_kept_bytes | |
| proxy_turns_fetched_total, proxy_turns_released_total | |
| proxy_turns_refused_total | code |
| proxy_openai_train_total | outcome |
| proxy_sessions, proxy_session_tokens | |
| proxy_policy_version_applied, proxy_policy_version_pushed | |
| proxy_push_failures_total | |

Engine names come from the settings, so their number is bounded.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.kit.counting import Counts, Durations
from services.kit.middleware import SECONDS_BUCKETS


class SpillMetrics:
    """Of files that the proxy writes itself."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.files_total = Counter(
            "proxy_spilled_files_total", "Files that the proxy wrote.", registry=registry
        )
        self.bytes_total = Counter(
            "proxy_spilled_bytes_total", "Bytes of these files.", registry=registry
        )
        self.rows_invalid_total = Counter(
            "proxy_spilled_rows_invalid_total",
            "Routing rows left out of these files as gaps.",
            registry=registry,
        )
        self.held_bytes = Gauge(
            "proxy_spill_held_bytes",
            "Bytes of answers that are read or wait for their file.",
            registry=registry,
        )


class KeptMetrics:
    """Of turns kept for hand-in by request id or session."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.turns = Gauge("proxy_kept_turns", "Turns kept.", registry=registry)
        self.bytes = Gauge("proxy_kept_bytes", "Bytes of kept turns.", registry=registry)
        self.fetched_total = Counter(
            "proxy_turns_fetched_total", "Turns given to a hand-in.", registry=registry
        )
        self.released_total = Counter(
            "proxy_turns_released_total", "Turns that were handed in durably.", registry=registry
        )
        self.refused_total = Counter(
            "proxy_turns_refused_total", "Hand-ins refused.", ("code",), registry=registry
        )


class Metrics:
    """One object, made by the app and handed to whoever counts. What each request counts are
    ``Counts`` and ``Durations``, which only the event loop may touch.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"proxy_{name}", text, labels, registry=registry)

        def counts(name: str, text: str, *labels: str) -> Counts:
            return Counts(f"proxy_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"proxy_{name}", text, labels, registry=registry)

        self.generate_total = counts(
            "generate_total", "Token-in/token-out requests.", "kind", "outcome"
        )
        self.attempts_total = counts(
            "attempts_total", "Calls of engines.", "engine", "leg", "outcome"
        )
        self.attempt_duration_seconds = Durations(
            "proxy_attempt_duration_seconds",
            "Time of one call of an engine.",
            ("leg",),
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.engine_in_flight = gauge("engine_in_flight", "Requests at an engine.", "engine")
        self.engine_serving = gauge("engine_serving", "1 when it takes requests.", "engine")
        self.ejections_total = counter("ejections_total", "Ejections of an engine.", "engine")
        self.retries_total = counter("retries_total", "Attempts after the first.")
        self.files_deleted_total = counter("files_deleted_total", "Files deleted.", "reason")
        self.deleted_bytes_total = counter("deleted_bytes_total", "Bytes deleted.", "reason")
        self.delete_failures_total = counter("delete_failures_total", "Deletions that failed.")
        self.deletions_pending = gauge(
            "deletions_pending", "Lost attempts and sessions whose files are looked for."
        )
        self.rows_not_asked_total = counter(
            "rows_not_asked_total", "Prompt rows that an earlier turn had already."
        )
        self.answers_total = counts("answers_total", "Answers by form of rows.", "kind", "form")
        self.answer_bytes_total = counts("answer_bytes_total", "Bytes sent to clients.", "kind")
        self.inline_instead_of_handle_total = counter(
            "inline_instead_of_handle_total",
            "Train answers that came inline although a payload_dir was given.",
        )
        self.spill = SpillMetrics(registry)
        self.kept = KeptMetrics(registry)
        self.openai_train_total = counter(
            "openai_train_total",
            "Train requests on OpenAI routes; untold: the engine told no token ids.",
            "outcome",
        )
        self.sessions = gauge("sessions", "Sessions remembered.")
        self.session_tokens = gauge("session_tokens", "Tokens remembered.")
        self.policy_version_applied = gauge(
            "policy_version_applied", "Least version over the serving engines."
        )
        self.policy_version_pushed = gauge(
            "policy_version_pushed", "Version that the orchestrator took."
        )
        self.push_failures_total = counter("push_failures_total", "Pushes that failed.")
