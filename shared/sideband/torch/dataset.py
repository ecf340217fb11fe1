"""A rank's feed as a dataset: reads in the data worker overlap training in the main process.

The worker owns the ``RankFeed``; the main process commits with a ``StepCommitter`` after its
optimizer step::

    keys = RankKeys(feed_key="/keys/feed.key", rank_key="/keys/rank.key_secret")
    dataset = RankFeedDataset(endpoint, dp_rank=0, cp_rank=1, payload_root="/mnt/run", keys=keys)
    committer = None
    for batch in DataLoader(dataset, batch_size=None, num_workers=1):
        train(batch)
        if batch.index + 1 == batch.count:
            optimizer.step()
            if committer is None:
                committer = StepCommitter(
                    endpoint, run_id=batch.run_id, global_rank=1, keys=keys
                )
            committer.commit(batch.step)

An error in the worker reaches the main process as torch brings it: a RuntimeError whose text
holds the named error.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.utils.data import IterableDataset, get_worker_info

from sideband.batch.types import Align
from sideband.errors import InvalidInput
from sideband.feed.keys import RankKeys
from sideband.feed.layers import Fill
from sideband.feed.rank import RankFeed
from sideband.feed.reads import RetryPlan
from sideband.ids import RunId
from sideband.model import ModelShape
from sideband.torch.tensors import TensorMicroBatch, to_tensors


class RankFeedDataset(IterableDataset[TensorMicroBatch]):
    """Micro batches of one rank over all steps, in order; use ``batch_size=None``.

    Options are those of ``RankFeed``. At most one worker: a second one would be a second process
    of the same rank. Each iteration joins anew, so ``committed_step`` None is the right choice
    where an iteration may be the second one: the feed remembers.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        dp_rank: int,
        cp_rank: int,
        global_rank: int | None = None,
        payload_root: Path | str | None = None,
        run_id: RunId | str | None = None,
        committed_step: int | None = None,
        model: ModelShape | None = None,
        align: Align = "next",
        layers: Sequence[int] | None = None,
        all_layers: bool = False,
        fill: Fill = "zeros",
        threads: int = 32,
        prefetch: int = 2,
        credit: int = 8,
        retry: RetryPlan | None = None,
        step_timeout_s: float = 1800.0,
        join_timeout_s: float = 120.0,
        keys: RankKeys | None = None,
        plain_beyond_loopback: bool = False,
        widen_experts: bool = False,
    ) -> None:
        super().__init__()
        self.endpoint, self.dp_rank, self.cp_rank = endpoint, dp_rank, cp_rank
        self.global_rank, self.payload_root, self.run_id = global_rank, payload_root, run_id
        self.committed_step, self.model, self.align = committed_step, model, align
        self.layers, self.all_layers, self.fill = layers, all_layers, fill
        self.threads, self.prefetch, self.credit, self.retry = threads, prefetch, credit, retry
        self.step_timeout_s, self.join_timeout_s = step_timeout_s, join_timeout_s
        self.keys, self.plain_beyond_loopback = keys, plain_beyond_loopback
        self.widen_experts = widen_experts

    def __iter__(self) -> Iterator[TensorMicroBatch]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers != 1:
            raise InvalidInput("num_workers", worker.num_workers, "must be 0 or 1: one rank, one")
        with self._open() as feed:
            while (batch := feed.next_micro_batch()) is not None:
                yield to_tensors(batch, widen_experts=self.widen_experts)

    def _open(self) -> RankFeed:
        """Sockets and threads belong to the process that iterates, so they are made here."""
        return RankFeed(
            self.endpoint,
            dp_rank=self.dp_rank,
            cp_rank=self.cp_rank,
            global_rank=self.global_rank,
            payload_root=self.payload_root,
            run_id=self.run_id,
            committed_step=self.committed_step,
            model=self.model,
            align=self.align,
            layers=self.layers,
            all_layers=self.all_layers,
            fill=self.fill,
            threads=self.threads,
            prefetch=self.prefetch,
            credit=self.credit,
            retry=self.retry,
            step_timeout_s=self.step_timeout_s,
            join_timeout_s=self.join_timeout_s,
            keys=self.keys,
            plain_beyond_loopback=self.plain_beyond_loopback,
        )
