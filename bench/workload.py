"""What the rows work on: models, routing rows, kept sets, samples in both forms.

Everything comes from a seed. Legend: T tokens, L layers, K experts per layer, N rows.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sideband.batch.columns import Runs
from sideband.batch.types import Sample
from sideband.ids import RolloutId, SampleId
from sideband.masks.rows import MaskRows
from sideband.model import ModelShape
from sideband.payload.columns import RowArray
from sideband.segments import AnySegment, PayloadSegment

VOCAB_SIZE: Final = 151_936
QWEN3_30B: Final = ModelShape(
    num_layers=48, layer_ids=tuple(range(48)), top_k=8, id_space=128, vocab_size=VOCAB_SIZE
)
GLM_45_AIR: Final = ModelShape(
    num_layers=46, layer_ids=tuple(range(1, 46)), top_k=8, id_space=128, vocab_size=VOCAB_SIZE
)
# 88 layers of which 40 have a router, top-22 of 512; with all its layers, as inline sends them.
NEMOTRON_SUPER: Final = ModelShape(
    num_layers=88, layer_ids=tuple(range(1, 81, 2)), top_k=22, id_space=512, vocab_size=131_072
)
NEMOTRON_SUPER_ALL: Final = ModelShape(
    num_layers=88, layer_ids=tuple(range(88)), top_k=22, id_space=512, vocab_size=131_072
)
_POOL_ROWS: Final = 512  # distinct routing rows; more would only cost time to draw
_FILE: Final = "v0/bench/{hh:02x}/request-{serial}-{turn}-0123456789abcdef.sbp"


def routing_rows(model: ModelShape, rows: int, *, seed: int) -> RowArray:
    """[N, L, K] with K distinct experts per layer, so that every row is a valid one."""
    rng = np.random.default_rng(seed)
    layers, top_k = model.row_shape
    draws = rng.random((_POOL_ROWS, layers, model.id_space), np.float32)
    pool = np.argpartition(draws, top_k - 1, axis=2)[:, :, :top_k]
    picks = rng.integers(0, _POOL_ROWS, rows)
    return (pool.astype(np.uint8) if model.id_space <= 256 else pool.astype(np.uint16))[picks]


def kept_counts(rows: int, *, seed: int) -> NDArray[np.int64]:
    """Kept-set sizes as real runs report them: mean 8, median 2, p99 82, 46 % of rows with one.

    One id in 46 % of rows, else a log-normal whose mean and 99th percentile give those of the
    whole: mu 1.93, sigma 1.19.
    """
    rng = np.random.default_rng(seed)
    sizes = np.maximum(2, np.rint(rng.lognormal(1.932, 1.187, rows))).astype(np.int64)
    sizes[rng.random(rows) < 0.46] = 1
    return np.minimum(sizes, VOCAB_SIZE)


def kept_sets(rows: int, *, vocab_size: int, seed: int) -> MaskRows:
    """Kept sets of real sizes, ids uniform over the vocabulary (the hardest to compress)."""
    counts = kept_counts(rows, seed=seed)
    starts = np.concatenate(([0], np.cumsum(counts)))
    rng = np.random.default_rng(seed + 1)
    row_of_id = np.repeat(np.arange(rows), counts)
    ids = rng.integers(0, vocab_size, int(starts[-1]))
    keys = np.sort(row_of_id * vocab_size + ids)  # by row, then by id
    repeated = np.flatnonzero(keys[1:] == keys[:-1])
    keep = np.ones(len(keys), np.bool_)
    keep[repeated + 1] = False
    counts = np.bincount(row_of_id[keep], minlength=rows)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return MaskRows(starts, (keys[keep] % vocab_size).astype(np.int32))


def sampled_tokens(masks: MaskRows, *, seed: int) -> NDArray[np.int32]:
    """One kept id of each row: the token that was sampled."""
    counts = np.diff(masks.starts_N)
    at = np.random.default_rng(seed).integers(0, counts)
    sampled: NDArray[np.int32] = masks.ids_M[masks.starts_N[:-1] + at]
    return sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleShape:
    """What a workload's samples are like: ``turns`` equal turns, half of each sampled."""

    tokens: int
    turns: int = 4
    with_masks: bool = False


def lengths(count: int, *, mean: int, seed: int) -> list[int]:
    """``count`` sample lengths between 0.2 and 1.8 of ``mean`` that add up to count × mean."""
    rng = np.random.default_rng(seed)
    stops = np.cumsum(rng.uniform(0.2, 1.8, count))
    edges = np.rint(stops * (count * mean / stops[-1])).astype(np.int64)
    return [int(value) for value in np.diff(edges, prepend=0)]


def handle_sample(serial: int, shape: SampleShape, model: ModelShape) -> Sample:
    """A sample by handle: one file per turn, segments that no file needs to back."""
    tokens, sampled_T = shape.tokens, _sampled(shape)
    rng = np.random.default_rng(serial)
    segments: list[AnySegment] = []
    for turn, (start, middle, stop) in enumerate(turn_bounds(shape)):
        file = _FILE.format(hh=serial % 256, serial=serial, turn=turn)
        last = min(stop, tokens - 1)
        if start < last:
            segments.append(_segment(file, "routed_experts", start, last, model))
        if shape.with_masks and middle < stop:
            segments.append(_segment(file, "sampling_mask", middle, stop, model))
    return Sample(
        sample_id=SampleId(f"rollout-{serial:08d}.b0"),
        rollout_id=RolloutId(f"rollout-{serial:08d}"),
        env_name="code",
        policy_version=serial % 4,
        token_ids_T=rng.integers(0, model.vocab_size, tokens, np.int32),
        loss_mask_T=sampled_T,
        logprobs_T=np.where(sampled_T, -rng.random(tokens, np.float32), np.float32(0)),
        advantages=Runs.of(np.where(sampled_T, np.float32(serial / 8), np.float32(0))),
        temperatures=Runs.of(np.where(sampled_T, np.float32(0.7), np.float32(1))),
        weight_versions=None,
        segments=tuple(segments),
        form="handle" if segments else None,
    )


def turn_bounds(shape: SampleShape) -> list[tuple[int, int, int]]:
    """Per turn: its first token, its first sampled token, and its end."""
    edges = np.linspace(0, shape.tokens, shape.turns + 1).astype(int).tolist()
    return [(a, max(a + (b - a) // 2, 1), b) for a, b in pairwise(edges)]


def _sampled(shape: SampleShape) -> NDArray[np.bool_]:
    sampled_T = np.zeros(shape.tokens, np.bool_)
    for _, middle, stop in turn_bounds(shape):
        sampled_T[middle:stop] = True
    return sampled_T


def _segment(file: str, field: str, start: int, stop: int, model: ModelShape) -> PayloadSegment:
    is_routing = field == "routed_experts"
    return PayloadSegment(
        field="routed_experts" if is_routing else "sampling_mask",
        file=file,
        offset=4096 if is_routing else 1 << 24,
        row=0,
        pos=start,
        rows=stop - start,
        dtype=("uint8" if model.id_space <= 256 else "uint16") if is_routing else "int32",
        shape=model.row_shape if is_routing else (model.vocab_size,),
    )
