"""One trainer rank. ``torchrun`` starts one process per rank of the grid::

    torchrun --nproc-per-node 4 -m examples.train_tiny_moe.rank SETTINGS.json

The data worker reads rows ahead while this process computes; this process commits each step after
its optimizer step.
"""

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from examples.train_tiny_moe.learner import USES, Learner, Use
from examples.train_tiny_moe.loss import Mismatch
from examples.train_tiny_moe.parallel import (
    Grid,
    SiblingKeys,
    join_grid,
    sum_gradients,
    sum_over_ranks,
)
from examples.train_tiny_moe.weights import load_model, resume_point_of, save_weights
from sideband import StepCommitter
from sideband.torch.dataset import RankFeedDataset
from sideband.torch.tensors import TensorMicroBatch

Precision = Literal["float32", "float64"]
DTYPES: Final[dict[Precision, torch.dtype]] = {"float32": torch.float32, "float64": torch.float64}
COLLECTIVE_TIMEOUT_S: Final = 60.0


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank of a run is told. Results go to the folder ``out``, written by rank 0."""

    endpoint: str
    payload_root: str
    model_folder: str
    out: str
    dp_size: int
    cp_size: int
    data_workers: int
    step_timeout_s: float


class LearnerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One learner's step: the mean loss over its trained tokens."""

    loss: float
    tokens: int


class UseReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far the float32 trainer was from the engine, with or without the engine's rows. Sums
    over ``tokens``, as in ``Mismatch``."""

    routing: bool
    masks: bool
    tokens: int
    distance: float
    k3: float
    scored: int
    divergence: float


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a step did, summed over all ranks."""

    step: int
    micro_batches: int  # per data rank
    dummies: int
    learners: dict[Precision, LearnerReport]
    uses: list[UseReport]

    def mismatch(self) -> dict[Use, Mismatch]:
        """By use of the engine's rows."""
        return {
            Use(routing=use.routing, masks=use.masks): Mismatch(
                tokens=use.tokens,
                distance=use.distance,
                k3=use.k3,
                scored=use.scored,
                divergence=use.divergence,
            )
            for use in self.uses
        }


def report_path(out: Path, step: int) -> Path:
    """Where a step's report lies."""
    return out / f"step{step}.json"


def gradients_path(out: Path, step: int, precision: Precision) -> Path:
    """Where a step's gradients lie, by parameter name."""
    return out / f"step{step}-{precision}.safetensors"


def weights_path(out: Path, step: int) -> Path:
    """Where the float32 weights lie that a step gave."""
    return out / f"weights-v{step}.safetensors"


def main(settings_path: Path) -> None:
    """One process of ``torchrun``."""
    settings = msgspec.json.decode(settings_path.read_bytes(), type=RankSettings)
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    try:
        train(settings, join_grid(dp_size=settings.dp_size, cp_size=settings.cp_size))
    finally:
        dist.destroy_process_group()


def train(settings: RankSettings, grid: Grid) -> None:
    """Until the feed ends. Raises what the feed raises."""
    learners = {
        precision: Learner(load_model(Path(settings.model_folder), dtype=dtype))
        for precision, dtype in DTYPES.items()
    }
    committer: StepCommitter | None = None
    taken: list[TensorMicroBatch] = []
    try:
        for batch in micro_batches(settings, grid, learners["float32"]):
            for learner in learners.values():
                learner.add(batch, SiblingKeys(grid.siblings))
            learners["float32"].compare(batch, SiblingKeys(grid.siblings))
            taken.append(batch)
            if batch.index + 1 == batch.count:
                finish_step(settings, grid, learners, taken)
                committer = committer or StepCommitter(
                    settings.endpoint, run_id=batch.run_id, global_rank=grid.global_rank
                )
                committer.commit(batch.step, lineage=batch.lineage)
                taken = []
    finally:
        if committer is not None:
            committer.close()


def micro_batches(
    settings: RankSettings, grid: Grid, learner: Learner
) -> Iterator[TensorMicroBatch]:
    """Everything the feed has for this rank, in order."""
    point = resume_point_of(Path(settings.model_folder))
    dataset = RankFeedDataset(
        settings.endpoint,
        dp_rank=grid.dp_rank,
        cp_rank=grid.cp_rank,
        payload_root=settings.payload_root,
        model=learner.model.config.shape,
        resume=point,
        committed_step=0 if point is None else None,  # its weights hold no step of the run
        threads=4,
        step_timeout_s=settings.step_timeout_s,
    )
    workers = settings.data_workers
    yield from DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
    )


def finish_step(
    settings: RankSettings,
    grid: Grid,
    learners: dict[Precision, Learner],
    taken: list[TensorMicroBatch],
) -> None:
    """Normalise over the whole step, apply, and keep what the step did for whoever looks."""
    is_first, step, out = grid.global_rank == 0, taken[0].step, Path(settings.out)
    reports: dict[Precision, LearnerReport] = {}
    for precision, learner in learners.items():
        sums = torch.tensor([learner.loss_sum, learner.tokens], dtype=torch.float64)
        sum_over_ranks(sums)
        loss_sum, tokens = sums.tolist()
        sum_gradients(learner.model.parameters(), tokens=int(tokens))
        reports[precision] = LearnerReport(loss=loss_sum / max(1, tokens), tokens=int(tokens))
        if is_first:
            save_file(learner.gradients(), gradients_path(out, step, precision))
    uses = summed_uses(learners["float32"])
    dummies = torch.tensor([sum(is_dummy(batch) for batch in taken)])
    sum_over_ranks(dummies)
    for learner in learners.values():
        learner.step()
    if is_first:
        point = taken[0].resume_point
        save_weights(learners["float32"].model, weights_path(out, step), point=point)
        report = StepReport(
            step=step,
            micro_batches=len(taken),
            dummies=int(dummies) // grid.cp_size,
            learners=reports,
            uses=uses,
        )
        report_path(out, step).write_bytes(msgspec.json.encode(report))


def is_dummy(batch: TensorMicroBatch) -> bool:
    """Whether the micro batch only fills the grid."""
    return all(sample_id is None for sample_id in batch.sample_ids)


def summed_uses(learner: Learner) -> list[UseReport]:
    """The mismatch over all ranks."""
    own = [learner.mismatch[use] for use in USES]
    sums = torch.tensor(
        [[each.tokens, each.distance, each.k3, each.scored, each.divergence] for each in own],
        dtype=torch.double,
    )
    sum_over_ranks(sums)
    return [
        UseReport(
            routing=use.routing,
            masks=use.masks,
            tokens=int(tokens),
            distance=distance,
            k3=k3,
            scored=int(scored),
            divergence=divergence,
        )
        for use, (tokens, distance, k3, scored, divergence) in zip(USES, sums.tolist(), strict=True)
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
