"""Many ``RankFeed`` in one process, each asking, taking and committing in a thread of its own.

A step is handed over when all ranks have committed the one before, so a delivery waits for no
other step. The first step is not counted: the ranks join in it.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

import httpx
import numpy as np

from bench.memory import Held, resident, resident_of
from bench.ours import RUN_ID, step_of
from bench.workload import GLM_45_AIR, SampleShape, handle_sample, lengths
from sideband.batch.packing import PackingPlan
from sideband.feed.codec import STEP_CONTENT_TYPE, encode_step
from sideband.feed.rank import RankFeed

WAIT_S: Final = 60.0


class RanksStood(RuntimeError):
    """Some rank did not commit a step in a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The ranks, and the steps that they get."""

    dp_size: int
    cp_size: int
    steps: int
    micro_batches: int
    seq_len: int

    @property
    def rank_count(self) -> int:
        """A socket for each."""
        return self.dp_size * self.cp_size

    def bodies(self) -> list[bytes]:
        """Steps without rows by handle or inline: what travels is all that there is to do."""
        count = self.dp_size * self.micro_batches * 4
        samples = [
            replace(
                handle_sample(serial, SampleShape(tokens=tokens), GLM_45_AIR),
                segments=(),
                form=None,
            )
            for serial, tokens in enumerate(lengths(count, mean=self.seq_len // 5, seed=3))
        ]
        plan = PackingPlan(seq_len=self.seq_len, dp_size=self.dp_size, cp_size=self.cp_size)
        step = replace(step_of(samples, plan, GLM_45_AIR), model=None)
        return [encode_step(replace(step, step=number)) for number in range(1, self.steps + 1)]


def run_ranks(*, endpoint: str, url: str, feed_pid: int, grid: dict[str, int]) -> dict[str, Any]:
    """All ranks and whoever hands the steps over; in a process of its own."""
    shape = Grid(**grid)
    bodies = shape.bodies()
    held = Held.begin()
    feed_bytes: list[int] = []
    own_bytes: list[int] = []
    with (
        httpx.Client(base_url=url, timeout=WAIT_S) as client,
        ThreadPoolExecutor(max_workers=shape.rank_count) as threads,
    ):
        load = _Load(endpoint, client, shape)
        trained = [threads.submit(load.train, rank) for rank in range(shape.rank_count)]
        for number, body in enumerate(bodies, start=1):
            load.hand_over(number, body)
            if number == 1:
                held.settle()
            feed_bytes.append(resident_of(feed_pid, "VmRSS"))
            own_bytes.append(resident("VmRSS"))
        client.post("/v1/end").raise_for_status()
        for one in trained:
            one.result(WAIT_S)
        page = client.get("/metrics").text
    seconds = np.concatenate([np.array(load.delivery_s[n]) for n in range(2, shape.steps + 1)])
    p50, p99 = np.percentile(seconds, [50, 99]).tolist()
    return {
        "body_bytes": len(bodies[0]),
        "deliveries": len(seconds),
        "p50_s": p50,
        "p99_s": p99,
        "step_s": float(np.median([max(load.delivery_s[n]) for n in range(2, shape.steps + 1)])),
        "held_bytes": held.held_bytes,
        "peak_bytes": held.peak_bytes(),
        "feed_bytes": feed_bytes,
        "own_bytes": own_bytes,
        "metrics": page,
    }


@dataclass(eq=False, slots=True)
class _Load:
    """What all threads share."""

    endpoint: str
    client: httpx.Client  # of the feed's service
    grid: Grid
    delivery_s: dict[int, list[float]] = field(default_factory=dict)  # by step
    _handed_s: dict[int, float] = field(default_factory=dict)
    _commits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def train(self, rank: int) -> None:
        """One rank from hello to the end."""
        dp_rank, cp_rank = divmod(rank, self.grid.cp_size)
        with RankFeed(
            self.endpoint,
            dp_rank=dp_rank,
            cp_rank=cp_rank,
            run_id=RUN_ID,
            threads=1,
            step_timeout_s=WAIT_S,
        ) as feed:
            for step in feed:
                for _ in step:
                    waited_s = time.perf_counter() - self._handed_s[step.step]
                    self.delivery_s[step.step].append(waited_s)
                step.commit()
                self._commits.release()

    def hand_over(self, number: int, body: bytes) -> None:
        """Put the step and wait until every rank has committed it. Raises RanksStood."""
        self.delivery_s[number], self._handed_s[number] = [], time.perf_counter()
        answer = self.client.put(
            f"/v1/steps/{number}", content=body, headers={"content-type": STEP_CONTENT_TYPE}
        )
        answer.raise_for_status()
        for _ in range(self.grid.rank_count):
            if not self._commits.acquire(timeout=WAIT_S):
                raise RanksStood(f"step {number} is not committed after {WAIT_S} s")
