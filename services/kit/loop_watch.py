"""Measures how late the event loop is: whatever holds it holds every request.

Beside the delay stands how much of it the loop's own thread was computing: on a busy machine the
rest is others' work, on a quiet one it is a call that blocks.
"""

import asyncio
import time
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, Histogram

PERIOD_S: Final = 0.01  # a hold of a tenth of a second shows as 0.09 s or more
DELAY_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class LoopMetrics:
    """``SERVICE_loop_…``: what the watch has seen since it began."""

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{service}_{name}", text, registry=registry)

        self.delay_seconds = Histogram(
            f"{service}_loop_delay_seconds",
            "How late the event loop was.",
            buckets=DELAY_BUCKETS_S,
            registry=registry,
        )
        self.delay_max_seconds = gauge("loop_delay_max_seconds", "The latest that it was.")
        self.busy_max_seconds = gauge("loop_busy_max_seconds", "Longest own work at a time.")


async def watch_loop(metrics: LoopMetrics) -> None:
    """Observe the delay of a short sleep, again and again."""
    loop = asyncio.get_running_loop()
    longest_s = busiest_s = 0.0
    while True:
        begin_s, begin_cpu_s = loop.time(), time.thread_time()
        await asyncio.sleep(PERIOD_S)
        late_s = max(0.0, loop.time() - begin_s - PERIOD_S)
        metrics.delay_seconds.observe(late_s)
        longest_s = max(longest_s, late_s)
        busiest_s = max(busiest_s, min(late_s, time.thread_time() - begin_cpu_s))
        metrics.delay_max_seconds.set(longest_s)
        metrics.busy_max_seconds.set(busiest_s)
