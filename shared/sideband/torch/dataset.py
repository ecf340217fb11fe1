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
            save(model, batch.resume_point)  # for ``resume`` when the trainer starts from it
            if committer is None:
                committer = StepCommitter(
                    endpoint, run_id=batch.run_id, global_rank=1, keys=keys
                )
            committer.commit(batch.step, lineage=batch.lineage)

An error in the worker reaches the main process as torch brings it: a RuntimeError whose text
holds the named error.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Required, TypedDict, Unpack

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


class RankFeedOptions(TypedDict, total=False):
    """The keyword arguments of ``RankFeed``, which says what they mean and their defaults."""

    dp_rank: Required[int]
    cp_rank: Required[int]
    global_rank: int | None
    payload_root: Path | str | None
    run_id: RunId | str | None
    committed_step: int | None
    resume: Mapping[str, object] | None
    model: ModelShape | None
    align: Align
    layers: Sequence[int] | None
    all_layers: bool
    fill: Fill
    threads: int
    prefetch: int
    credit: int
    retry: RetryPlan | None
    step_timeout_s: float
    join_timeout_s: float
    commit_timeout_s: float
    peer_timeout_s: float
    keys: RankKeys | None
    plain_beyond_loopback: bool


class RankFeedDataset(IterableDataset[TensorMicroBatch]):
    """Micro batches of one rank over all steps, in order; use ``batch_size=None``.

    Options are those of ``RankFeed``. At most one worker: a second one would be a second process
    of the same rank. Each iteration joins anew, so neither ``committed_step`` nor ``resume`` is the
    right choice where an iteration may be the second one: the feed remembers.
    """

    def __init__(
        self, endpoint: str, *, widen_experts: bool = False, **options: Unpack[RankFeedOptions]
    ) -> None:
        super().__init__()
        inspect.signature(RankFeed).bind(endpoint, **options)  # a wrong name fails here, not later
        self.endpoint, self.widen_experts, self.options = endpoint, widen_experts, options

    def __iter__(self) -> Iterator[TensorMicroBatch]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers != 1:
            raise InvalidInput("num_workers", worker.num_workers, "must be 0 or 1: one rank, one")
        # Sockets and threads belong to the process that iterates, so they are made here.
        with RankFeed(self.endpoint, **self.options) as feed:
            while (batch := feed.next_micro_batch()) is not None:
                yield to_tensors(batch, widen_experts=self.widen_experts)
