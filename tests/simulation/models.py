"""Shapes and requests that these tests share."""

from sideband.model import ModelShape
from simulation.truth import Truth

TINY = ModelShape(num_layers=6, layer_ids=(1, 2, 4), top_k=4, id_space=16, vocab_size=97)
WIDE = ModelShape(num_layers=4, layer_ids=(0, 3), top_k=10, id_space=512, vocab_size=1 << 17)
SHAPES = (TINY, WIDE)


def truths(seed: int) -> list[Truth]:
    """One per width of expert ids."""
    return [Truth(shape, seed=seed) for shape in SHAPES]
