"""The orchestrator with ten thousand rollouts in flight: what durability costs."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import orjson

from bench import postgres
from bench.http.processes import free_port, peak_bytes, server
from bench.http.scrape import bucket_of, metric
from bench.orchestrator.bodies import MODEL_CONFIG, RUN_ID
from bench.orchestrator.load import Outcome, run
from bench.registry import Row
from bench.results import Claim, Measurement, RowResult
from bench.scale import Scale

OFF: Final = "ledger off (memory)"
SQLITE: Final = "SQLite"
POSTGRES: Final = "PostgreSQL"
BLOCK_MS_MAX: Final = 100.0
GROWTH_MAX: Final = 110.0  # % of what was held when half of the deliveries were due
DELAY: Final = "orchestrator_loop_delay_seconds"


def sides(stack: ExitStack, folder: Path) -> Iterator[tuple[str, str]]:
    """Name and URL of each ledger that this machine has."""
    yield OFF, "memory"
    yield SQLITE, f"sqlite:///{folder}/ledger.sqlite3"
    binaries = postgres.binaries()
    if binaries is not None:
        yield POSTGRES, stack.enter_context(postgres.server(binaries))


def measure(scale: Scale) -> RowResult:
    """Every ledger under the same load, one after the other."""
    in_flight = scale.pick(tiny=64, quick=10_000, full=10_000)
    rate = scale.pick(tiny=50.0, quick=500.0, full=500.0)
    seconds = scale.pick(tiny=1.0, quick=15.0, full=60.0)
    measurements, claims, notes = [], [], []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="sideband-load-")))
        for name, url in sides(stack, folder):
            outcome, peak = one(folder / name.split()[0], url, in_flight, rate, seconds, scale)
            p50, p99 = outcome.quantile_s(50), outcome.quantile_s(99)
            busiest_ms = 1e3 * metric(outcome.metrics, "orchestrator_loop_busy_max_seconds")
            measurements.append(
                Measurement(
                    side=f"{name}: median delivery",
                    seconds=p50,
                    peak_bytes=peak,
                    rate=outcome.rate,
                    rate_unit="rollouts/s",
                )
            )
            claims += [
                Claim(what=f"{name}: rollouts/s held", value=outcome.rate, unit="/s",
                      target=0.98 * rate),
                Claim(what=f"{name}: 99th percentile of a delivery", value=1e3 * p99, unit="ms"),
                Claim(what=f"{name}: CPU time of the service per rollout",
                      value=1e3 * outcome.cpu_s / len(outcome.latencies_s), unit="ms"),
                Claim(what=f"{name}: longest work of the event loop", value=busiest_ms, unit="ms",
                      target=BLOCK_MS_MAX, is_ceiling=True),
                Claim(what=f"{name}: 99th percentile of the loop's delay, at most",
                      value=1e3 * bucket_of(outcome.metrics, DELAY, 0.99), unit="ms"),
                Claim(what=f"{name}: memory at the end, of that after half of the deliveries",
                      value=100 * outcome.end_bytes / outcome.half_bytes, unit="%",
                      target=GROWTH_MAX, is_ceiling=True),
            ]  # fmt: skip
            notes.append(f"{name}: {words(outcome)}")
        if postgres.binaries() is None:
            notes.append("PostgreSQL is not installed here, so it was left out.")
    return RowResult(
        name="orchestrator_load",
        title="Durable rollouts under load",
        setting=f"{in_flight} leases in flight, {rate:.0f} rollouts/s of 1024 tokens by handle for "
        f"{seconds:.0f} s, each delivery followed by a lease; steps of 512, committed and applied "
        "at once; client, service and database share the machine's cores",
        measurements=measurements,
        claims=claims,
        notes=notes,
    )


def one(
    folder: Path, url: str, in_flight: int, rate: float, seconds: float, scale: Scale
) -> tuple[Outcome, int]:
    """One side: what its client saw, and the peak memory of the service."""
    folder.mkdir()
    config = folder / "config.json"
    config.write_bytes(orjson.dumps(MODEL_CONFIG))
    port, feed_port = free_port(), free_port()
    settings = {
        "PORT": port,
        "RUN_ID": RUN_ID,
        "LEDGER_URL": url,
        "PAYLOAD_ROOT": folder / "payloads",
        "MODEL_CONFIG_PATH": config,
        "CHECK_FILES": "false",  # the cost of the filesystem is another row's
        "FEED_URL": f"http://127.0.0.1:{feed_port}",
        "INITIAL_POLICY_VERSION": 0,
        "MAX_OFF_POLICY_STEPS": 1_000_000,
        "STEP_ROLLOUTS": scale.pick(tiny=16, quick=512, full=512),
        "STEPS_AHEAD_MAX": 4,
        # A third of the deliveries: from there on what is known of ended ones must not grow.
        "HISTORY_MAX": scale.pick(tiny=16, quick=2_500, full=10_000),
        "LOG_LEVEL": "warning",
    }
    environment = {f"SIDEBAND_ORCHESTRATOR_{name}": str(value) for name, value in settings.items()}
    with server(["-m", "services.orchestrator"], port, environment=environment) as pid:
        outcome = run(port, feed_port, pid, in_flight=in_flight, rate=rate, seconds=seconds)
        return outcome, peak_bytes(pid)


def words(outcome: Outcome) -> str:
    """How commits were shared."""
    commits = metric(outcome.metrics, "orchestrator_ledger_commits_total")
    changes = metric(outcome.metrics, "orchestrator_ledger_changes_total")
    spent = metric(outcome.metrics, "orchestrator_ledger_commit_seconds_sum")
    late_ms = 1e3 * metric(outcome.metrics, "orchestrator_loop_delay_max_seconds")
    return (
        f"{changes:.0f} changes in {commits:.0f} commits of {1e3 * spent / max(1, commits):.1f} ms "
        f"on average; {outcome.steps} steps; the loop was at most {late_ms:.0f} ms late, others' "
        "work on this machine included"
    )


ROWS: Final = [Row("orchestrator_load", measure)]
