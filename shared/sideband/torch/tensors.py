"""A rank's micro batch as torch tensors.

Legend: N rows of the chunk, L layers, K experts per layer, S sequences of the packed row.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self, overload

import numpy as np
import torch
from numpy.typing import NDArray

from sideband.feed.micro_batch import RankMicroBatch
from sideband.feed.resume import ResumePoint
from sideband.ids import RunId


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorMicroBatch:
    """As ``RankMicroBatch``, field by field, where arrays are tensors.

    ``routed_experts`` are uint8 as they came or int32: torch computes little with uint16, so that
    is always widened. Tensors share the micro batch's memory where their dtype is the same.
    """

    run_id: RunId
    lineage: int
    step: int
    index: int
    count: int
    input_ids: torch.Tensor  # [1, N] int32, as all per-token tensors have the shape
    labels: torch.Tensor  # int32, -100 where nothing follows in the sequence
    loss_mask: torch.Tensor  # bool
    advantages: torch.Tensor  # float32
    logprobs: torch.Tensor  # float32
    temperatures: torch.Tensor  # float32
    position_ids: torch.Tensor  # int32
    weight_versions: torch.Tensor | None  # int32
    cu_seqlens: torch.Tensor  # [S + 1] int32
    sequence_lengths: torch.Tensor  # [S] int32
    sample_ids: tuple[str | None, ...]
    env_names: tuple[str, ...]
    policy_versions: tuple[int, ...]
    packed_positions: torch.Tensor  # [N] int64
    routed_experts: torch.Tensor | None  # [1, N, L, K] uint8 or int32
    layer_ids: tuple[int, ...]
    routing_valid: torch.Tensor  # bool
    mask_starts: torch.Tensor  # [N + 1] int64
    mask_ids: torch.Tensor  # int32
    mask_logprobs: torch.Tensor | None  # float32, one per kept id

    def __len__(self) -> int:
        return int(self.input_ids.shape[1])

    @property
    def resume_point(self) -> ResumePoint:
        """As ``RankMicroBatch.resume_point``."""
        return ResumePoint(run_id=self.run_id, lineage=self.lineage, step=self.step)

    def pin_memory(self) -> Self:
        """With every tensor in pinned memory; ``DataLoader(pin_memory=True)`` calls it."""
        return self._changed(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """With every tensor on ``device``."""
        return self._changed(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        changed: dict[str, Any] = {
            item.name: change(value)
            for item in fields(self)
            if isinstance(value := getattr(self, item.name), torch.Tensor)
        }
        return replace(self, **changed)


def to_tensors(batch: RankMicroBatch, *, widen_experts: bool = False) -> TensorMicroBatch:
    """The micro batch as tensors; with ``widen_experts`` uint8 experts become int32 too."""
    routed = batch.routed_experts
    if routed is not None and (widen_experts or routed.dtype == np.uint16):
        experts: torch.Tensor | None = torch.from_numpy(routed.astype(np.int32))
    else:
        experts = _tensor(routed)
    return TensorMicroBatch(
        run_id=batch.run_id,
        lineage=batch.lineage,
        step=batch.step,
        index=batch.index,
        count=batch.count,
        input_ids=_tensor(batch.input_ids),
        labels=_tensor(batch.labels),
        loss_mask=_tensor(batch.loss_mask),
        advantages=_tensor(batch.advantages),
        logprobs=_tensor(batch.logprobs),
        temperatures=_tensor(batch.temperatures),
        position_ids=_tensor(batch.position_ids),
        weight_versions=_tensor(batch.weight_versions),
        cu_seqlens=_tensor(batch.cu_seqlens),
        sequence_lengths=_tensor(batch.sequence_lengths),
        sample_ids=batch.sample_ids,
        env_names=batch.env_names,
        policy_versions=batch.policy_versions,
        packed_positions=_tensor(batch.packed_positions),
        routed_experts=experts,
        layer_ids=batch.layer_ids,
        routing_valid=_tensor(batch.routing_valid),
        mask_starts=_tensor(batch.mask_starts),
        mask_ids=_tensor(batch.mask_ids),
        mask_logprobs=_tensor(batch.mask_logprobs),
    )


@overload
def _tensor(array: NDArray[np.generic]) -> torch.Tensor: ...
@overload
def _tensor(array: None) -> None: ...
@overload
def _tensor(array: NDArray[np.generic] | None) -> torch.Tensor | None: ...
def _tensor(array: NDArray[np.generic] | None) -> torch.Tensor | None:
    """A tensor over the array's memory; torch cannot hold read-only memory, so that is copied."""
    if array is None:
        return None
    return torch.from_numpy(array if array.flags.writeable else array.copy())
