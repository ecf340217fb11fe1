"""Whether two trainings did the same: the loss, and the gradient of every parameter."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

# Element by element, beside the relative tolerance: far below any gradient that moves a weight,
# far above what float64 sums leave of terms that cancel.
ATOL_OF_LARGEST: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far ours is from plain training, in parts of plain training's own size.

    ``loss`` is |Δ| / |loss|. ``gradients`` is the norm of the difference over the norm, of the
    parameter that is worst by it; infinite where something is not a number. ``outside`` counts
    elements beyond rtol × |element| + 1e-9 × the parameter's largest.
    """

    loss: float
    gradients: float
    worst: str
    parameters: int
    outside: int
    elements: int


def difference(
    ours: Mapping[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor],
    *,
    our_loss: float,
    plain_loss: float,
    rtol: float,
) -> Difference:
    """Compare every parameter. Raises KeyError when the names differ."""
    if ours.keys() != plain.keys():
        raise KeyError(sorted(ours.keys() ^ plain.keys()))
    worst, worst_name = 0.0, ""
    outside = elements = 0
    for name, expected in plain.items():
        found = ours[name].to(expected.dtype)
        delta = (found - expected).abs()
        norm = float(expected.norm())
        relative = float(delta.norm()) / norm if norm else float(delta.norm())
        relative = math.inf if math.isnan(relative) else relative
        if relative >= worst:
            worst, worst_name = relative, name
        allowed = rtol * expected.abs() + ATOL_OF_LARGEST * float(expected.abs().max())
        outside += int((~(delta <= allowed)).sum())  # a NaN is outside too
        elements += expected.numel()
    return Difference(
        loss=abs(our_loss - plain_loss) / max(abs(plain_loss), 1e-30),
        gradients=worst,
        worst=worst_name,
        parameters=len(plain),
        outside=outside,
        elements=elements,
    )
