"""Measures how late the event loop is: whatever holds it holds every request.

Beside the delay stands how much of it the loop's own thread was computing: on a busy machine the
rest is others' work, on a quiet one it is a call that blocks.
"""

import asyncio
import time
from typing import Final

from services.orchestrator.metrics import Metrics

PERIOD_S: Final = 0.01  # a hold of a tenth of a second shows as 0.09 s or more


async def watch_loop(metrics: Metrics) -> None:
    """Observe the delay of a short sleep, again and again."""
    loop = asyncio.get_running_loop()
    longest_s = busiest_s = 0.0
    while True:
        begin_s, begin_cpu_s = loop.time(), time.thread_time()
        await asyncio.sleep(PERIOD_S)
        late_s = max(0.0, loop.time() - begin_s - PERIOD_S)
        metrics.loop_delay_seconds.observe(late_s)
        longest_s = max(longest_s, late_s)
        busiest_s = max(busiest_s, min(late_s, time.thread_time() - begin_cpu_s))
        metrics.loop_delay_max_seconds.set(longest_s)
        metrics.loop_busy_max_seconds.set(busiest_s)
