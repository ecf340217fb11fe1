"""How far a trainer is from the engine, on answers that a real engine gave with known weights."""

import asyncio
from pathlib import Path
from typing import Final

from examples.train_tiny_moe.answers import read_answers
from examples.train_tiny_moe.delivery import Writer
from examples.train_tiny_moe.learner import USES, Learner, Use
from examples.train_tiny_moe.loss import Mismatch
from examples.train_tiny_moe.rollouts import Rollout
from examples.train_tiny_moe.services import RUN, Job, running
from examples.train_tiny_moe.weights import CONFIG_NAME, load_model
from sideband import ModelShape, PayloadRoot, RankFeed
from sideband.batch.packing import round_up
from sideband.torch.tensors import to_tensors

SEQ_LEN_MULTIPLE: Final = 256
RANK_TIMEOUT_S: Final = 60.0


async def measure(
    model_folder: Path, answers_path: Path, out: Path, *, answers_root: Path | None = None
) -> dict[Use, Mismatch]:
    """The float32 trainer's mismatch for each use of the engine's rows.

    The answers take the whole way: payload files, orchestrator, feed, one rank. ``model_folder``
    holds the engine's own weights; ``answers_root`` the rows of answers by handle; ``out`` gets the
    payload root of the run. Raises UnusableAnswer, IncompleteRows, WrongWeights, RunFailed.
    """
    learner = Learner(await asyncio.to_thread(load_model, model_folder))
    rollouts = await asyncio.to_thread(read_answers, answers_path, answers_root)
    longest = max(len(turn.token_ids) for rollout in rollouts for turn in rollout.turns)
    job = Job(
        dp_size=1,
        cp_size=1,
        layout="contiguous",
        seq_len=round_up(longest, SEQ_LEN_MULTIPLE),
        step_rollouts=len(rollouts),
        config_path=model_folder / CONFIG_NAME,
        payload_root=out / "payloads",
    )
    async with running(job) as services:
        root = await asyncio.to_thread(PayloadRoot.open, job.payload_root, run_id=RUN)
        writer = Writer(root=root, model=learner.model.config.shape)
        for rollout in rollouts:
            lease = {"rollout_id": rollout.rollout_id, "group_id": rollout.group_id}
            await services.call("POST", "/v1/leases", {**lease, "group_size": 1})
            body = await asyncio.to_thread(_body, writer, rollout)
            await services.call("POST", "/v1/rollouts", body)
        await services.call("POST", "/v1/admin/drain")
        await asyncio.to_thread(_read_all, learner, services.endpoint, job.payload_root)
    return {use: learner.mismatch[use] for use in USES}


def _body(writer: Writer, rollout: Rollout) -> dict[str, object]:
    """With an advantage of its own: alone in its group it would train nothing."""
    body = writer.rollout_body(rollout, policy_version=0)
    return {**body, "reward": None, "advantage": 1.0}


def _read_all(learner: Learner, endpoint: str, payload_root: Path) -> None:
    """The one rank of the run, to its end."""
    shape: ModelShape = learner.model.config.shape
    with RankFeed(
        endpoint,
        dp_rank=0,
        cp_rank=0,
        payload_root=payload_root,
        model=shape,
        threads=4,
        step_timeout_s=RANK_TIMEOUT_S,
    ) as feed:
        for step in feed:
            for batch in step:
                learner.compare(to_tensors(batch))
            step.commit()
