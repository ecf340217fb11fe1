"""The steps that both sides send: DP 8 × CP 4, 32 ranks."""

from dataclasses import replace
from typing import Final

import msgspec

from bench.ours import RUN_ID, step_of
from bench.workload import GLM_45_AIR, SampleShape, handle_sample, lengths
from sideband.batch.packing import PackingPlan
from sideband.feed.codec import encode_step
from sideband.feed.facts import FeedPlan

DP_SIZE: Final = 8
CP_SIZE: Final = 4
RANKS: Final = DP_SIZE * CP_SIZE


class FeedShape(msgspec.Struct, frozen=True):
    """Size of a step, and how many there are."""

    samples: int
    mean_tokens: int
    seq_len: int
    steps: int


def bodies(shape: FeedShape) -> list[bytes]:
    """The body of each step, from 1 on."""
    samples = [
        handle_sample(serial, SampleShape(tokens=tokens), GLM_45_AIR)
        for serial, tokens in enumerate(lengths(shape.samples, mean=shape.mean_tokens, seed=7))
    ]
    plan = PackingPlan(seq_len=shape.seq_len, dp_size=DP_SIZE, cp_size=CP_SIZE)
    step = step_of(samples, plan, GLM_45_AIR)
    return [encode_step(replace(step, step=number)) for number in range(1, shape.steps + 1)]


def feed_plan(shape: FeedShape) -> FeedPlan:
    """What the feed serves."""
    return FeedPlan(
        run_id=RUN_ID,
        rank_count=RANKS,
        dp_size=DP_SIZE,
        cp_size=CP_SIZE,
        layout="contiguous",
        steps_held_max=shape.steps,
        peer_timeout_s=60.0,
    )
