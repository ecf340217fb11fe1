"""Rollouts of the stand-in engine, a grid of ranks in this process, and what they compute."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from examples.train_tiny_moe.config import TinyMoeConfig
from examples.train_tiny_moe.delivery import Writer, lease_body
from examples.train_tiny_moe.engine import StandInEngine
from examples.train_tiny_moe.learner import Learner, batch_loss
from examples.train_tiny_moe.model import TinyMoe
from examples.train_tiny_moe.rollouts import Rollout
from examples.train_tiny_moe.scenes import planned, play
from examples.train_tiny_moe.services import RUN, Job, running
from examples.train_tiny_moe.weights import load_model, make_model_folder
from sideband import PayloadRoot, RankFeed
from sideband.batch.types import Layout
from sideband.torch.tensors import TensorMicroBatch, to_tensors

CONFIG_PATH: Final = Path("examples/train_tiny_moe/tiny-moe.config.json").resolve()
CONFIG: Final = TinyMoeConfig.load(CONFIG_PATH)
SEQ_LEN: Final = 64
DP_SIZE: Final = 2
CP_SIZE: Final = 2
WAIT_S: Final = 20.0

# Matrices this small gain nothing from threads, and lose much where other tests run beside them.
torch.set_num_threads(1)

Batches = dict[tuple[int, int], list[TensorMicroBatch]]  # by (dp_rank, cp_rank)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Played:
    """Rollouts, and the folder of the weights that sampled them."""

    model_folder: Path
    rollouts: list[Rollout]

    def model(self, dtype: torch.dtype = torch.float64) -> TinyMoe:
        """Those weights."""
        return load_model(self.model_folder, dtype=dtype)


def play_all(folder: Path) -> Played:
    """One step of every scene."""
    make_model_folder(folder, CONFIG_PATH, seed=0)
    engine = StandInEngine(folder, noise_std=0.1)
    rollouts = [
        play(engine, plan, vocab_size=CONFIG.shape.vocab_size)
        for plan in planned(seq_len=SEQ_LEN, seed=0, step=1)
    ]
    return Played(model_folder=folder, rollouts=rollouts)


def collect(played: Played, layout: Layout, payload_root: Path) -> Batches:
    """What each rank of the grid gets: by handle, through orchestrator, feed and ``RankFeed``."""
    return asyncio.run(_collect(played, layout, payload_root))


async def _collect(played: Played, layout: Layout, payload_root: Path) -> Batches:
    plans = {plan.rollout_id: plan for plan in planned(seq_len=SEQ_LEN, seed=0, step=1)}
    job = Job(
        dp_size=DP_SIZE,
        cp_size=CP_SIZE,
        layout=layout,
        seq_len=SEQ_LEN,
        step_rollouts=len(plans),
        config_path=CONFIG_PATH,
        payload_root=payload_root,
    )
    async with running(job) as services:
        writer = Writer(root=PayloadRoot.open(payload_root, run_id=RUN), model=CONFIG.shape)
        for rollout in played.rollouts:
            await services.call("POST", "/v1/leases", lease_body(plans[rollout.rollout_id]))
            body = await asyncio.to_thread(writer.rollout_body, rollout, policy_version=0)
            await services.call("POST", "/v1/rollouts", body)
        await services.call("POST", "/v1/admin/drain")
        places = [(dp, cp) for dp in range(DP_SIZE) for cp in range(CP_SIZE)]
        found = await asyncio.gather(
            *(asyncio.to_thread(_read, services.endpoint, payload_root, *at) for at in places)
        )
    return dict(zip(places, found, strict=True))


def _read(endpoint: str, payload_root: Path, dp_rank: int, cp_rank: int) -> list[TensorMicroBatch]:
    batches: list[TensorMicroBatch] = []
    with RankFeed(
        endpoint,
        dp_rank=dp_rank,
        cp_rank=cp_rank,
        payload_root=payload_root,
        threads=2,
        step_timeout_s=WAIT_S,
    ) as feed:
        for step in feed:
            batches += [to_tensors(batch) for batch in step]
            step.commit()
    return batches


class ThreadKeys:
    """Context-parallel siblings as threads of this process: one graph, one backward pass."""

    def __init__(self, shared: list[torch.Tensor | None], barrier: threading.Barrier, rank: int):
        self._shared, self._barrier, self._rank = shared, barrier, rank

    def places(
        self, sequence_N: torch.Tensor, order_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._gathered(sequence_N), self._gathered(order_N)

    def extend(
        self, layer: int, key_NGD: torch.Tensor, value_NGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._gathered(key_NGD), self._gathered(value_NGD)

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        self._shared[self._rank] = rows
        self._barrier.wait(WAIT_S)
        everything = torch.cat([part for part in self._shared if part is not None])
        self._barrier.wait(WAIT_S)  # nobody writes the next one before all have read
        return everything


def siblings_loss(model: TinyMoe, chunks: Sequence[TensorMicroBatch]) -> torch.Tensor:
    """The sum over the chunks of one packed row, each on a thread of its own."""
    shared: list[torch.Tensor | None] = [None] * len(chunks)
    barrier = threading.Barrier(len(chunks))

    def one(rank: int) -> torch.Tensor:
        return batch_loss(model, chunks[rank], ThreadKeys(shared, barrier, rank))

    with ThreadPoolExecutor(len(chunks)) as pool:
        return torch.stack(list(pool.map(one, range(len(chunks))))).sum()


def grid_step(
    model: TinyMoe,
    batches: Batches,
    change: Callable[[tuple[int, int], TensorMicroBatch], TensorMicroBatch] = lambda _, batch: (
        batch
    ),
) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Mean loss, trained tokens and gradients of a whole step; ``change`` damages what a rank got.

    What four processes would do with collectives happens here in one graph.
    """
    learner, loss_sum, tokens = Learner(model), 0.0, 0
    for dp_rank in range(DP_SIZE):
        rows = zip(*(batches[dp_rank, cp_rank] for cp_rank in range(CP_SIZE)), strict=True)
        for row in rows:
            chunks = [change((dp_rank, cp_rank), chunk) for cp_rank, chunk in enumerate(row)]
            loss = siblings_loss(model, chunks)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            loss_sum += float(loss.detach())
            tokens += sum(int(chunk.loss_mask.sum()) for chunk in chunks)
    gradients = {name: gradient / tokens for name, gradient in learner.gradients().items()}
    return loss_sum / tokens, tokens, gradients
