"""The feed's service with 64 ranks that live in one process, each with a socket of its own."""

from dataclasses import asdict
from typing import Any, Final

from bench.feed.many_ranks import Grid, run_ranks
from bench.http.processes import free_port, peak_bytes, server
from bench.http.scrape import bucket_of, metric
from bench.memory import in_child
from bench.ours import RUN_ID
from bench.registry import Row
from bench.results import Claim, Measurement, RowResult
from bench.scale import Scale

BLOCK_MS_MAX: Final = 100.0
GROWTH_MAX: Final = 110.0  # % of what was held after a quarter of the steps


def measure(scale: Scale) -> RowResult:
    """Steps one after the other, each committed by all ranks before the next comes."""
    grid = Grid(
        dp_size=scale.pick(tiny=2, quick=16, full=16),
        cp_size=scale.pick(tiny=2, quick=4, full=4),
        steps=scale.pick(tiny=4, quick=16, full=64),
        micro_batches=scale.pick(tiny=1, quick=4, full=8),
        seq_len=scale.pick(tiny=256, quick=8_192, full=32_768),
    )
    port, endpoint = free_port(), f"tcp://127.0.0.1:{free_port()}"
    settings = {
        "PORT": port,
        "RUN_ID": RUN_ID,
        "ENDPOINT": endpoint,
        "DP_SIZE": grid.dp_size,
        "CP_SIZE": grid.cp_size,
        "LOG_LEVEL": "warning",
    }
    environment = {f"SIDEBAND_FEED_{name}": str(value) for name, value in settings.items()}
    with server(["-m", "services.trainer_feed"], port, environment=environment) as pid:
        url = f"http://127.0.0.1:{port}"
        found = in_child(run_ranks, endpoint=endpoint, url=url, feed_pid=pid, grid=asdict(grid))
        feed_peak_bytes = peak_bytes(pid)
    return RowResult(
        name="feed_load",
        title=f"The feed's service with {grid.rank_count} ranks in one process",
        setting=f"{grid.steps} steps of {found['body_bytes']} bytes, DP {grid.dp_size} × CP "
        f"{grid.cp_size}; a delivery lasts from the moment a step is put over HTTP until a rank's "
        "trainer has the micro batch, released by all ranks; the first step, in which they join, "
        "is not counted; feed and ranks share the machine's cores",
        measurements=[
            Measurement(
                side="the feed: a step, from its PUT to its last delivery",
                seconds=found["step_s"],
                bytes=found["body_bytes"],
                held_bytes=found["feed_bytes"][-1],
                peak_bytes=feed_peak_bytes - found["feed_bytes"][0],
            ),
            Measurement(
                side=f"{grid.rank_count} ranks: median delivery",
                seconds=found["p50_s"],
                held_bytes=found["held_bytes"],
                peak_bytes=found["peak_bytes"],
            ),
        ],
        claims=_claims(found),
        notes=[
            f"{found['deliveries']} deliveries; the feed's loop was at most "
            f"{1e3 * metric(found['metrics'], 'feed_loop_delay_max_seconds'):.0f} ms late, others' "
            "work on this machine included."
        ],
    )


def _claims(found: dict[str, Any]) -> list[Claim]:
    page = found["metrics"]
    return [
        Claim(what="99th percentile of a delivery", value=1e3 * found["p99_s"], unit="ms"),
        Claim(
            what="longest work of the feed's event loop",
            value=1e3 * metric(page, "feed_loop_busy_max_seconds"),
            unit="ms",
            target=BLOCK_MS_MAX,
            is_ceiling=True,
        ),
        Claim(
            what="99th percentile of the loop's delay, at most",
            value=1e3 * bucket_of(page, "feed_loop_delay_seconds", 0.99),
            unit="ms",
        ),
        *(
            Claim(
                what=f"memory of {whose} at the end, of that after a quarter of the steps",
                value=100 * held[-1] / held[len(held) // 4],
                unit="%",
                target=GROWTH_MAX,
                is_ceiling=True,
            )
            for whose, held in (
                ("the feed", found["feed_bytes"]),
                ("the ranks' process", found["own_bytes"]),
            )
        ),
    ]


ROWS: Final = [Row("feed_load", measure)]
