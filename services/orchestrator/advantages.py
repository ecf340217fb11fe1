"""Puts a group's advantage on the samples of a rollout. Pure."""

from dataclasses import replace

import numpy as np
from msgspec import structs

from services.orchestrator.records import Rollout
from sideband.batch.columns import Runs
from sideband.batch.rows import NEUTRAL_ADVANTAGE
from sideband.batch.types import Sample


def with_advantage(sample: Sample, advantage: float) -> Sample:
    """The sample with ``advantage`` on its trained tokens, as ``samples_of`` would have put it."""
    column_T = np.where(
        sample.loss_mask_T, np.float32(advantage), np.float32(NEUTRAL_ADVANTAGE)
    ).astype(np.float32)
    return replace(sample, advantages=Runs.of(column_T))


def advantaged(rollout: Rollout, advantage: float) -> Rollout:
    """The rollout with its group's advantage on every sample."""
    samples = tuple(with_advantage(sample, advantage) for sample in rollout.samples)
    return structs.replace(rollout, advantage=advantage, samples=samples)
