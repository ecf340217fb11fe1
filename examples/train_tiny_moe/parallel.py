"""Collectives of a trainer: keys of context-parallel siblings, sums over all ranks.

Legend: N rows of this rank, M = N × R rows of all R context-parallel ranks, G key heads, D head
size.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grid:
    """This process in the grid of data × context-parallel ranks."""

    dp_rank: int
    cp_rank: int
    cp_size: int
    siblings: dist.ProcessGroup  # the context-parallel ranks of this data rank

    @property
    def global_rank(self) -> int:
        """Context-parallel siblings are neighbours."""
        return self.dp_rank * self.cp_size + self.cp_rank


def join_grid(*, dp_size: int, cp_size: int) -> Grid:
    """This process's place. Every process of the world calls it, in the same order."""
    dp_rank, cp_rank = divmod(dist.get_rank(), cp_size)
    groups = [
        dist.new_group(list(range(first, first + cp_size)))
        for first in range(0, dp_size * cp_size, cp_size)
    ]
    return Grid(dp_rank=dp_rank, cp_rank=cp_rank, cp_size=cp_size, siblings=groups[dp_rank])


class _Gathered(torch.autograd.Function):
    """All ranks' rows in rank order; backward, each rank gets what all ranks say of its rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        rank, ranks = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        return total.chunk(ranks)[rank], None


def gathered(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The rows of all ranks of the group, in rank order; every rank must have as many."""
    out: torch.Tensor = _Gathered.apply(rows, group)  # type: ignore[no-untyped-call]  # torch's own
    return out


class SiblingKeys:
    """Rows see the keys of all context-parallel siblings, who must run the same passes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def places(
        self, sequence_N: torch.Tensor, order_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of all siblings."""
        both = gathered(torch.stack((sequence_N, order_N), 1), self._group)
        return both[:, 0], both[:, 1]

    def extend(
        self, layer: int, key_NGD: torch.Tensor, value_NGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of all siblings, in one collective."""
        both = gathered(torch.stack((key_NGD, value_NGD), 1), self._group)
        return both[:, 0], both[:, 1]


def sum_over_ranks(values: torch.Tensor) -> None:
    """In place, over every rank of the world."""
    dist.all_reduce(values)


def sum_gradients(parameters: Iterable[torch.nn.Parameter], *, tokens: int) -> None:
    """Gradients of the whole step's mean: the sum over all ranks, divided by its tokens.

    One collective for all of them. A parameter that no row of this rank used has zeros.
    """
    held = list(parameters)
    for parameter in held:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in held if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    sum_over_ranks(flat)
    flat /= max(1, tokens)
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()
