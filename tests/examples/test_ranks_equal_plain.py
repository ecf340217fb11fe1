"""Loss and gradients of a DP 2 × CP 2 grid, fed by handle, are those of one process fed inline.

And they stop being so when a row, a layer or a chunk's edge is not what a trainer thinks it is.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from examples.train_tiny_moe.comparison import Difference, difference
from examples.train_tiny_moe.learner import Learner
from examples.train_tiny_moe.plain import PlainStep, plain_step
from examples.train_tiny_moe.rank import is_dummy
from examples.train_tiny_moe.run import RTOL
from sideband.torch.tensors import TensorMicroBatch
from tests.examples.support import SEQ_LEN, Batches, Played, collect, grid_step

pytestmark = pytest.mark.torch

Place = tuple[int, int]
Change = Callable[[Place, TensorMicroBatch], TensorMicroBatch]
LAYOUTS = ("contiguous", "zigzag")


@pytest.fixture(scope="module")
def plain(played: Played) -> tuple[PlainStep, Any]:
    """Plain training's step, and its gradients."""
    learner = Learner(played.model())
    return plain_step(learner.model, played.rollouts, seq_len=SEQ_LEN), learner.gradients()


@pytest.fixture(scope="module", params=LAYOUTS)
def batches(
    played: Played, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Batches:
    """What the ranks of the grid got, for both ways to cut a row."""
    return collect(played, request.param, tmp_path_factory.mktemp("root") / "payloads")


def compare(
    played: Played, plain: tuple[PlainStep, Any], batches: Batches, change: Change | None = None
) -> tuple[Difference, int]:
    loss, tokens, gradients = (
        grid_step(played.model(), batches)
        if change is None
        else grid_step(played.model(), batches, change)
    )
    step, expected = plain
    found = difference(gradients, expected, our_loss=loss, plain_loss=step.loss, rtol=RTOL)
    return found, tokens


def test_every_gradient_is_that_of_plain_training(
    played: Played, plain: tuple[PlainStep, Any], batches: Batches
) -> None:
    found, tokens = compare(played, plain, batches)
    assert tokens == plain[0].tokens > 150
    assert found.parameters == len(list(played.model().parameters()))
    assert found.outside == 0
    assert found.loss < 1e-12
    assert found.gradients < 1e-12


def test_the_step_holds_every_kind_of_row(batches: Batches) -> None:
    """Otherwise the equality above would say less than it seems to."""
    chunks = [chunk for own in batches.values() for chunk in own]
    assert any(is_dummy(chunk) for chunk in chunks)
    assert any(chunk.routed_experts is None and chunk.loss_mask.any() for chunk in chunks)
    real = [chunk for chunk in chunks if chunk.routed_experts is not None]
    assert any((chunk.loss_mask & ~chunk.routing_valid).any() for chunk in real)  # holes that train
    without_mask = [chunk.loss_mask[0] & (chunk.mask_starts.diff() == 0) for chunk in real]
    assert any(rows.any() and not rows.all() for rows in without_mask)
    assert max(int((chunk.sequence_lengths > 0).sum()) for chunk in chunks) > 1  # packed
    assert max(int(chunk.sequence_lengths.max()) for chunk in chunks) == SEQ_LEN  # truncated
    assert any((chunk.loss_mask[0] & piece_ends(chunk)).any() for chunk in chunks)


def test_the_engines_logprobs_of_kept_ids_are_those_of_the_rows(batches: Batches) -> None:
    """Each row's own: they add up to 1, and the drawn token's is the engine's logprob of it."""
    checked = 0
    for chunk in (chunk for own in batches.values() for chunk in own):
        for row in torch.where(chunk.loss_mask[0] & (chunk.mask_starts.diff() > 0))[0].tolist():
            assert chunk.mask_logprobs is not None
            own = slice(int(chunk.mask_starts[row]), int(chunk.mask_starts[row + 1]))
            scores, ids = chunk.mask_logprobs[own], chunk.mask_ids[own]
            assert float(scores.exp().sum()) == pytest.approx(1, abs=1e-5)
            drawn = scores[ids == chunk.labels[0, row]]
            assert drawn.tolist() == [float(chunk.logprobs[0, row])]
            checked += 1
    assert checked > 100


def piece_ends(batch: TensorMicroBatch) -> Any:
    """Rows whose next token is on another rank, or in another sequence."""
    ends = torch.ones(len(batch), dtype=torch.bool)
    ends[:-1] = batch.packed_positions.diff() != 1
    return ends


def rows_one_later(_: Place, batch: TensorMicroBatch) -> TensorMicroBatch:
    if batch.routed_experts is None:
        return batch
    return replace(batch, routed_experts=batch.routed_experts.roll(1, dims=1))


def layers_swapped(_: Place, batch: TensorMicroBatch) -> TensorMicroBatch:
    if batch.routed_experts is None:
        return batch
    return replace(batch, routed_experts=batch.routed_experts.flip(2))


def layers_by_offset(_: Place, batch: TensorMicroBatch) -> TensorMicroBatch:
    """Columns taken for layers 0, 1, 2: the dense layer is forgotten."""
    if batch.routed_experts is None:
        return batch
    shifted = batch.routed_experts.roll(-1, dims=2)
    return replace(batch, routed_experts=shifted)


def gaps_replayed(_: Place, batch: TensorMicroBatch) -> TensorMicroBatch:
    """The fill of rows that nobody reported is taken for what ran."""
    return replace(batch, routing_valid=torch.ones_like(batch.routing_valid))


def second_rank_reads_one_early(place: Place, batch: TensorMicroBatch) -> TensorMicroBatch:
    """Its chunk is cut one token off: rows of the positions before."""
    return rows_one_later(place, batch) if place[1] == 1 else batch


def masks_one_later(_: Place, batch: TensorMicroBatch) -> TensorMicroBatch:
    counts = batch.mask_starts.diff().roll(1)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    last = int(batch.mask_starts.diff()[-1]) if len(batch) else 0
    return replace(batch, mask_starts=starts, mask_ids=batch.mask_ids.roll(last))


def no_edge_token(_: Place, batch: TensorMicroBatch) -> TensorMicroBatch:
    """The last row of a piece never hears what follows it."""
    return replace(batch, loss_mask=batch.loss_mask & ~piece_ends(batch))


def labels_within_the_chunk(_: Place, batch: TensorMicroBatch) -> TensorMicroBatch:
    """Labels shifted by hand inside the chunk: wrong at its edge only."""
    shifted = batch.input_ids.roll(-1, dims=1)
    return replace(batch, labels=torch.where(batch.labels < 0, batch.labels, shifted))


def keys_in_rank_order(place: Place, batch: TensorMicroBatch) -> TensorMicroBatch:
    """As if rank r held the r-th part of the row: true for contiguous chunks of one piece only."""
    return replace(batch, packed_positions=torch.arange(len(batch)) + place[1] * len(batch) // 2)


def sequences_run_together(_: Place, batch: TensorMicroBatch) -> TensorMicroBatch:
    whole = batch.cu_seqlens[[0, -1]]
    return replace(batch, cu_seqlens=whole)


@pytest.mark.parametrize(
    "change",
    [
        rows_one_later,
        layers_swapped,
        layers_by_offset,
        gaps_replayed,
        second_rank_reads_one_early,
        masks_one_later,
        no_edge_token,
        labels_within_the_chunk,
        keys_in_rank_order,
        sequences_run_together,
    ],
)
def test_a_wrong_reading_of_the_tensors_is_seen(
    played: Played, plain: tuple[PlainStep, Any], batches: Batches, change: Change
) -> None:
    found, _ = compare(played, plain, batches, change)
    assert found.outside > 0
    assert found.gradients > 100 * RTOL
    assert found.loss > 10 * RTOL
