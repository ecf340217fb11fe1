"""Tensors equal the arrays, and a data worker feeds a DataLoader while the main process commits."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sideband.feed.committer import StepCommitter
from sideband.feed.micro_batch import RankMicroBatch
from sideband.feed.rank import RankFeed
from tests.unit.feed.builders import make_step
from tests.unit.feed.live import LiveFeed, live_feed, plan_of, stored_samples

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch


def a_step(tmp_path: Path, *, number: int = 1) -> Any:
    _, samples = stored_samples(tmp_path)
    return make_step(step=number, samples=samples, dp_size=1, cp_size=1, seq_len=16)


def arrays_of(feed: LiveFeed, **options: Any) -> list[RankMicroBatch]:
    rank = feed.rank(0, 0, **options)
    found = []
    while (batch := rank.next_micro_batch()) is not None:
        found.append(batch)
    rank.close()
    return found


def test_tensors_hold_what_the_arrays_hold(tmp_path: Path) -> None:
    from sideband.torch.tensors import to_tensors

    step = a_step(tmp_path)
    with live_feed(plan_of(step)) as feed:
        feed.put(step)
        feed.do(lambda server: server.end())
        for batch in arrays_of(feed, payload_root=tmp_path):
            tensors = to_tensors(batch)
            assert len(tensors) == len(batch)
            assert tensors.routed_experts is not None
            assert tensors.routed_experts.dtype == torch.int32  # uint16 is widened
            for name in batch.__slots__:
                value = getattr(batch, name)
                if isinstance(value, np.ndarray):
                    np.testing.assert_array_equal(getattr(tensors, name).numpy(), value)
            assert tensors.to("cpu").labels is not None


def test_uint8_experts_stay_unless_they_are_widened(tmp_path: Path) -> None:
    from dataclasses import replace

    from sideband.torch.tensors import to_tensors

    step = a_step(tmp_path)
    with live_feed(plan_of(step)) as feed:
        feed.put(step)
        feed.do(lambda server: server.end())
        batch = arrays_of(feed, payload_root=tmp_path)[0]
    assert batch.routed_experts is not None
    narrow = replace(batch, routed_experts=(batch.routed_experts % 200).astype(np.uint8))
    kept, wide = to_tensors(narrow), to_tensors(narrow, widen_experts=True)
    assert kept.routed_experts is not None
    assert wide.routed_experts is not None
    assert kept.routed_experts.dtype == torch.uint8
    assert wide.routed_experts.dtype == torch.int32
    without = to_tensors(replace(batch, routed_experts=None, weight_versions=None))
    assert without.routed_experts is None
    frozen = batch.labels.copy()
    frozen.flags.writeable = False
    assert to_tensors(replace(batch, labels=frozen)).labels is not None


def test_a_data_worker_reads_ahead_and_the_main_process_commits(tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    from sideband.torch.dataset import RankFeedDataset

    steps = [a_step(tmp_path / str(number), number=number) for number in (1, 2)]
    steps[1] = make_step(step=2, form=None, dp_size=1, cp_size=1, seq_len=16)
    with live_feed(plan_of(steps[0], peer_timeout_s=60.0)) as feed:
        for step in steps:
            feed.put(step)
        feed.do(lambda server: server.end())
        dataset = RankFeedDataset(
            feed.bound, dp_rank=0, cp_rank=0, payload_root=tmp_path / "1", threads=2
        )
        loader = DataLoader(
            dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn"
        )
        seen = []
        with StepCommitter(feed.bound, run_id="run-a", global_rank=0) as committer:
            for batch in loader:
                seen.append((batch.step, batch.index))
                assert batch.input_ids.dtype == torch.int32
                if batch.index + 1 == batch.count:
                    committer.commit(batch.step, lineage=batch.lineage)
        feed.until(lambda delivery: delivery.is_drained)
    assert seen == [(step.step, i) for step in steps for i in range(step.micro_batch_count)]


def test_two_workers_would_be_two_processes_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from sideband.errors import InvalidInput
    from sideband.torch import dataset as module

    class Worker:
        num_workers = 2

    monkeypatch.setattr(module, "get_worker_info", Worker)
    dataset = module.RankFeedDataset("tcp://127.0.0.1:9", dp_rank=0, cp_rank=0)
    with pytest.raises(InvalidInput, match="num_workers"):
        next(iter(dataset))


def test_the_dataset_works_in_the_main_process_too(tmp_path: Path) -> None:
    from sideband.torch.dataset import RankFeedDataset

    step = a_step(tmp_path)
    with live_feed(plan_of(step)) as feed:
        feed.put(step)
        feed.do(lambda server: server.end())
        dataset = RankFeedDataset(
            feed.bound, dp_rank=0, cp_rank=0, payload_root=tmp_path, threads=2, widen_experts=True
        )
        assert [batch.index for batch in dataset] == list(range(step.micro_batch_count))


def test_options_are_those_of_the_feed_and_a_wrong_one_fails_at_once() -> None:
    module = pytest.importorskip("sideband.torch.dataset")
    parameters = set(inspect.signature(RankFeed).parameters) - {"endpoint"}
    assert parameters == set(module.RankFeedOptions.__annotations__)
    with pytest.raises(TypeError, match="cp_rnak"):
        module.RankFeedDataset("tcp://127.0.0.1:9", dp_rank=0, cp_rank=0, cp_rnak=1)
    with pytest.raises(TypeError, match="dp_rank"):
        module.RankFeedDataset("tcp://127.0.0.1:9", cp_rank=0)
