"""The watch of the event loop: a call that blocks shows, and as the loop's own work."""

import asyncio
import time

from prometheus_client import CollectorRegistry

from services.kit.loop_watch import PERIOD_S, LoopMetrics, watch_loop

HELD_S = 20 * PERIOD_S


async def held(block: bool) -> tuple[float, float]:
    """The latest that the loop was and its longest own work, with it held once or not."""
    registry = CollectorRegistry()
    watch = asyncio.create_task(watch_loop(LoopMetrics(registry, "it")))
    try:
        await asyncio.sleep(3 * PERIOD_S)
        if block:
            begin_s = time.thread_time()
            while time.thread_time() - begin_s < HELD_S:
                pass
        await asyncio.sleep(3 * PERIOD_S)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    late_s = registry.get_sample_value("it_loop_delay_max_seconds")
    busy_s = registry.get_sample_value("it_loop_busy_max_seconds")
    assert late_s is not None
    assert busy_s is not None
    assert (registry.get_sample_value("it_loop_delay_seconds_count") or 0) >= 2
    return late_s, busy_s


def test_a_call_that_holds_the_loop_shows_as_its_own_work() -> None:
    late_s, busy_s = asyncio.run(held(block=True))
    assert late_s >= busy_s >= HELD_S - PERIOD_S


def test_work_never_exceeds_the_delay() -> None:
    late_s, busy_s = asyncio.run(held(block=False))
    assert 0 <= busy_s <= late_s
