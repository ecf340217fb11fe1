"""What the trainer gets of one micro batch on one rank.

Legend: N rows of the rank's chunk, L layers, K experts per layer, S sequences of the packed row.
"""

import hashlib
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from sideband.batch.types import Align
from sideband.feed.resume import ResumePoint
from sideband.ids import RunId


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMicroBatch:
    """Micro batch ``index`` of ``count`` of a step, this rank's context-parallel chunk of it.

    Under ``align`` "next" row i's labels, loss_mask, advantages, logprobs, temperatures,
    weight_versions and kept set are those of token i + 1; under "token" of token i. Routing is
    always about the input token. ``routed_experts`` is None when the whole packed row has no
    routing; where ``routing_valid`` is False its rows hold only the fill. ``layer_ids`` names its
    columns. Row i keeps ``mask_ids[mask_starts[i]:mask_starts[i + 1]]``; no ids: no replay.
    ``mask_logprobs`` are what the engine gave each kept id, NaN where it did not say; None when
    it never did in the whole packed row.
    ``cu_seqlens`` are the padded boundaries of the whole packed row, equal on all CP ranks;
    ``sequence_lengths`` are the real lengths, ``sample_ids`` None for padding.
    """

    run_id: RunId
    lineage: int  # how often the trainer had gone back; commit the step with it
    step: int
    index: int
    count: int
    align: Align
    input_ids: NDArray[np.int32]  # [1, N], as all per-token arrays
    labels: NDArray[np.int32]  # -100 where nothing follows in the sequence
    loss_mask: NDArray[np.bool_]
    advantages: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    temperatures: NDArray[np.float32]
    position_ids: NDArray[np.int32]
    weight_versions: NDArray[np.int32] | None
    cu_seqlens: NDArray[np.int32]  # [S + 1]
    sequence_lengths: NDArray[np.int32]  # [S]
    sample_ids: tuple[str | None, ...]
    env_names: tuple[str, ...]
    policy_versions: tuple[int, ...]
    packed_positions: NDArray[np.int64]  # [N]: where the rows lie in the packed row
    routed_experts: NDArray[np.uint8] | NDArray[np.uint16] | None  # [1, N, L, K]
    layer_ids: tuple[int, ...]
    routing_valid: NDArray[np.bool_]
    mask_starts: NDArray[np.int64]  # [N + 1]
    mask_ids: NDArray[np.int32]
    mask_logprobs: NDArray[np.float32] | None

    def __len__(self) -> int:
        return len(self.input_ids[0])

    @property
    def resume_point(self) -> ResumePoint:
        """What a checkpoint keeps that holds this step's optimizer step: ``RankFeed(resume=…)``."""
        return ResumePoint(run_id=self.run_id, lineage=self.lineage, step=self.step)

    def digest(self) -> str:
        """sha256 over every value but run and lineage: the same rollouts agree, also again."""
        hasher = hashlib.sha256()
        for item in fields(self):
            if item.name in {"run_id", "lineage"}:
                continue
            value = getattr(self, item.name)
            if isinstance(value, np.ndarray):
                hasher.update(f"{item.name}:{value.dtype.str}:{value.shape};".encode())
                hasher.update(np.ascontiguousarray(value).data)
            else:
                hasher.update(f"{item.name}={value!r};".encode())
        return hasher.hexdigest()
