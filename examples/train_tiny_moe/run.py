"""The example: rollouts, a real feed, ranks under torchrun, and plain training beside them.

In each step the engine plays rollouts with the newest weights, their rows go to payload files, the
orchestrator packs them, four ranks train on what the feed gives them and commit. A single process
trains on the same rollouts as they came inline; loss and gradients must agree. Then the engine
takes the new weights, the new policy is told, and the files of the step are deleted.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from safetensors.torch import load_file

from examples.train_tiny_moe.comparison import Difference, difference
from examples.train_tiny_moe.delivery import Writer, lease_body
from examples.train_tiny_moe.engine import StandInEngine
from examples.train_tiny_moe.launch import ranks
from examples.train_tiny_moe.learner import Learner
from examples.train_tiny_moe.plain import plain_step
from examples.train_tiny_moe.rank import (
    DTYPES,
    Precision,
    RankSettings,
    StepReport,
    gradients_path,
    report_path,
    weights_path,
)
from examples.train_tiny_moe.rollouts import Rollout
from examples.train_tiny_moe.scenes import GROUP_SIZE, planned, play, scenes
from examples.train_tiny_moe.services import RUN, Job, RunFailed, Services, running
from examples.train_tiny_moe.weights import CONFIG_NAME, load_model, make_model_folder
from sideband import PayloadRoot
from sideband.batch.types import Layout

RTOL: Final = 1e-5
RANKS_END_S: Final = 60.0
RANK_STEP_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run. ``out`` gets a folder per layout."""

    out: Path
    config_path: Path
    layouts: tuple[Layout, ...] = ("contiguous", "zigzag")
    steps: int = 2
    dp_size: int = 2
    cp_size: int = 2
    seq_len: int = 96
    seed: int = 0
    noise_std: float = 0.1
    data_workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step of one layout: what the ranks did, and how it compares with plain training."""

    layout: Layout
    report: StepReport
    differences: dict[Precision, Difference]

    @property
    def is_equal(self) -> bool:
        """Loss and gradients within 1e-5 of plain training's: in float64 each element, in float32
        each parameter's gradient as a whole, since single elements are what rounding leaves."""
        wide, narrow = self.differences["float64"], self.differences["float32"]
        return (
            wide.outside == 0
            and max(wide.loss, wide.gradients, narrow.loss, narrow.gradients) <= RTOL
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """All steps of one layout. ``files_left`` are payload files that outlived the run."""

    layout: Layout
    steps: tuple[StepResult, ...]
    files_left: int

    @property
    def is_good(self) -> bool:
        """Every step equal, nothing left behind."""
        return all(step.is_equal for step in self.steps) and self.files_left == 0


class PlainTraining:
    """The single process: it trains on inline arrays, once per precision, from the same start."""

    def __init__(self, model_folder: Path) -> None:
        self._learners = {
            precision: Learner(load_model(model_folder, dtype=dtype))
            for precision, dtype in DTYPES.items()
        }

    def step(
        self, rollouts: list[Rollout], report: StepReport, out: Path, *, seq_len: int
    ) -> dict[Precision, Difference]:
        """Train one step, and compare its loss and gradients with what the ranks left."""
        found: dict[Precision, Difference] = {}
        for precision, learner in self._learners.items():
            plain = plain_step(learner.model, rollouts, seq_len=seq_len)
            ours = report.learners[precision]
            if plain.tokens != ours.tokens:
                raise RunFailed(f"ranks trained {ours.tokens} tokens, plain {plain.tokens}")
            found[precision] = difference(
                load_file(gradients_path(out, report.step, precision)),
                learner.gradients(),
                our_loss=ours.loss,
                plain_loss=plain.loss,
                rtol=RTOL,
            )
            learner.step()
        return found


async def run(plan: Plan) -> list[RunResult]:
    """Every layout, one after the other. Raises RunFailed."""
    model_folder = plan.out / "model"
    await asyncio.to_thread(make_model_folder, model_folder, plan.config_path, seed=plan.seed)
    return [await run_layout(plan, model_folder, layout) for layout in plan.layouts]


async def run_layout(plan: Plan, model_folder: Path, layout: Layout) -> RunResult:
    """One run from its first lease to its end."""
    out = plan.out / layout
    out.mkdir(parents=True, exist_ok=True)
    job = Job(
        dp_size=plan.dp_size,
        cp_size=plan.cp_size,
        layout=layout,
        seq_len=plan.seq_len,
        step_rollouts=len(scenes(seq_len=plan.seq_len)) * GROUP_SIZE,
        config_path=model_folder / CONFIG_NAME,
        payload_root=out / "payloads",
    )
    engine = await asyncio.to_thread(StandInEngine, model_folder, noise_std=plan.noise_std)
    plain = await asyncio.to_thread(PlainTraining, model_folder)
    steps: list[StepResult] = []
    async with (
        running(job) as services,
        ranks(rank_settings(plan, job, services, model_folder, out)) as ended,
    ):
        for number in range(1, plan.steps + 1):
            rollouts = await play_step(plan, engine, services, job, number)
            await services.committed(number, ranks_ended=ended)
            report = msgspec.json.decode(report_path(out, number).read_bytes(), type=StepReport)
            differences = await asyncio.to_thread(
                plain.step, rollouts, report, out, seq_len=plan.seq_len
            )
            steps.append(StepResult(layout=layout, report=report, differences=differences))
            await asyncio.to_thread(engine.load, weights_path(out, number))
            await services.call("PUT", "/v1/policy-version", {"policy_version": number})
        await services.ended()
        async with asyncio.timeout(RANKS_END_S):
            await ended
    files = await asyncio.to_thread(lambda: list(job.payload_root.rglob("*.sbp")))
    return RunResult(layout=layout, steps=tuple(steps), files_left=len(files))


def rank_settings(
    plan: Plan, job: Job, services: Services, model_folder: Path, out: Path
) -> RankSettings:
    """What every rank is told."""
    return RankSettings(
        endpoint=services.endpoint,
        payload_root=str(job.payload_root),
        model_folder=str(model_folder),
        out=str(out),
        dp_size=job.dp_size,
        cp_size=job.cp_size,
        data_workers=plan.data_workers,
        step_timeout_s=RANK_STEP_TIMEOUT_S,
    )


async def play_step(
    plan: Plan, engine: StandInEngine, services: Services, job: Job, number: int
) -> list[Rollout]:
    """Lease, play and deliver one step's rollouts, by handle."""
    root = await asyncio.to_thread(PayloadRoot.open, job.payload_root, run_id=RUN)
    writer = Writer(root=root, model=engine.shape)
    rollouts: list[Rollout] = []
    for planned_one in planned(seq_len=plan.seq_len, seed=plan.seed, step=number):
        lease = await services.call("POST", "/v1/leases", lease_body(planned_one))
        version = int(lease["policy_version"])
        if version != number - 1:
            raise RunFailed(f"step {number} would play policy {version}")
        rollout = await asyncio.to_thread(
            play, engine, planned_one, vocab_size=engine.shape.vocab_size
        )
        body = await asyncio.to_thread(writer.rollout_body, rollout, policy_version=version)
        await services.call("POST", "/v1/rollouts", body)
        rollouts.append(rollout)
    return rollouts
