"""A real feed on a loop of its own thread, and real ranks in threads: for tests over real ZMQ."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sideband.batch.types import Sample
from sideband.feed.codec import Step, encode_step
from sideband.feed.delivery import Delivery
from sideband.feed.facts import FeedPlan
from sideband.feed.keys import FeedKeys
from sideband.feed.observer import FeedObserver
from sideband.feed.rank import RankFeed
from sideband.feed.server import FeedServer, PutReceipt
from sideband.ids import RequestId
from sideband.masks.rows import MaskRows, ScoreRows
from sideband.payload.columns import ChoicePayload, MaskColumn, RoutingRows
from sideband.payload.root import PayloadRoot
from sideband.payload.writer import write_payload
from sideband.segments import InlineSegment
from sideband.testing.batches import WIDE_MODEL, make_sample
from tests.unit.feed.builders import RUN

T = TypeVar("T")
WAIT_S = 8.0  # far beyond what any of these waits needs


class DenialCounter(FeedObserver):
    """Who was not let in, by reason."""

    def __init__(self) -> None:
        self.denied: Counter[str] = Counter()

    def peers_denied(self, reason: str, count: int) -> None:
        """Count them."""
        self.denied[reason] += count


@dataclass(eq=False)
class LiveFeed:
    """A feed behind a blocking face."""

    plan: FeedPlan
    endpoint: str = "tcp://127.0.0.1:*"
    keys: FeedKeys | None = None
    ranks: list[RankFeed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.bound = self._started.result(WAIT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self.observer = DenialCounter()
        self.server = FeedServer(
            Delivery(self.plan), self.endpoint, keys=self.keys, observer=self.observer
        )
        async with self.server.serving():
            self._started.set_result(self.server.bound_endpoint)
            await self._stop.wait()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the feed's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def do(self, work: Callable[[FeedServer], T]) -> T:
        """Call something on the feed's loop."""

        async def run() -> T:
            return work(self.server)

        return self.call(run())

    def put(self, step: Step) -> PutReceipt:
        """Hand over a step."""
        return self.call(self.server.put(encode_step(step), step=step.step))

    def until(self, ready: Callable[[Delivery], bool]) -> None:
        """Wait until the machine shows something."""

        async def wait() -> None:
            async with asyncio.timeout(WAIT_S):
                while not ready(self.server.delivery):  # noqa: ASYNC110 - the machine has no event
                    await asyncio.sleep(0.005)

        self.call(wait())

    def rank(self, dp_rank: int, cp_rank: int, **options: Any) -> RankFeed:
        """A rank that is closed with the feed."""
        feed = RankFeed(
            self.bound,
            dp_rank=dp_rank,
            cp_rank=cp_rank,
            **{"threads": 4, "step_timeout_s": WAIT_S, **options},
        )
        self.ranks.append(feed)
        return feed

    def close(self) -> None:
        """Stop everything. Idempotent."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(RankFeed.close, self.ranks))
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def live_feed(
    plan: FeedPlan, *, endpoint: str = "tcp://127.0.0.1:*", keys: FeedKeys | None = None
) -> Iterator[LiveFeed]:
    """A feed that is closed on the way out."""
    feed = LiveFeed(plan, endpoint, keys)
    try:
        yield feed
    finally:
        feed.close()


def plan_of(step: Step, **changes: Any) -> FeedPlan:
    """The plan that fits a step."""
    return FeedPlan(
        **{
            "run_id": step.run_id,
            "rank_count": step.dp_size * step.cp_size,
            "dp_size": step.dp_size,
            "cp_size": step.cp_size,
            "layout": step.layout,
            "steps_held_max": 4,
            "peer_timeout_s": 5.0,
            **changes,
        }
    )


def in_parallel(works: "Sequence[Callable[[], T]]") -> list[T]:
    """Run blocking works together; ranks wait for each other."""
    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(lambda work: work(), works))


def store(root: PayloadRoot, sample: Sample) -> Sample:
    """The same sample by handle: its inline rows written to a payload file."""
    parts: dict[str, InlineSegment] = {}
    for segment in sample.segments:
        assert isinstance(segment, InlineSegment)
        assert segment.field not in parts, "one segment per field: no breaks, no gaps"
        parts[segment.field] = segment
    routing = masks = None
    if (part := parts.get("routed_experts")) is not None:
        assert isinstance(part.data, np.ndarray)
        routing = RoutingRows(pos=part.pos, rows_NLK=part.data)
    if (part := parts.get("sampling_mask")) is not None:
        assert isinstance(part.data, MaskRows)
        tokens = sample.token_ids_T[part.pos : part.stop]
        logprobs = None
        if (scores := parts.get("sampling_mask_logprobs")) is not None:
            assert isinstance(scores.data, ScoreRows)
            logprobs = scores.data.values_M
        masks = MaskColumn(
            pos=part.pos, masks=part.data, sampled_token_ids_N=tokens, logprobs_M=logprobs
        )
    report = write_payload(
        root,
        policy_version=0,
        request_id=RequestId(sample.sample_id),
        model=WIDE_MODEL,
        choices=[ChoicePayload(choice=0, routing=routing, masks=masks)],
    )
    names = sample.__slots__
    values = {name: getattr(sample, name) for name in names}
    return Sample(**{**values, "segments": report.segments[0], "form": "handle"})


def stored_samples(folder: Path, *, count: int = 5) -> tuple[list[Sample], list[Sample]]:
    """The same samples inline and by handle."""
    root = PayloadRoot.create(folder, RUN, fresh=True)
    inline = [make_sample(i, tokens=9 + i, prompt_tokens=3) for i in range(count)]
    return inline, [store(root, sample) for sample in inline]


def read_all(feed: RankFeed) -> list[tuple[int, int, str]]:
    """Consume everything to the end: (step, index, digest), each step committed."""
    seen = []
    for step in feed:
        for batch in step:
            assert np.isfinite(batch.logprobs).all()
            seen.append((batch.step, batch.index, batch.digest()))
        step.commit()
    return seen
