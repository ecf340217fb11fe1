"""Rows without routing: k distinct experts each, and no expert loaded more (P37-39)."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sideband.feed.layers import choose_layers, fill_invalid
from sideband.model import ModelShape

# experts and top-k of public models, and spaces that top-k divides, or does not
SHAPES = [(128, 8), (256, 8), (512, 22), (512, 10), (64, 6), (8, 2), (16, 1), (7, 3), (5, 5)]


def filled(id_space: int, top_k: int, positions: range) -> NDArray[Any]:
    """[rows, 2 layers, top-k] of rows that have no routing."""
    model = ModelShape(num_layers=3, layer_ids=(1, 2), top_k=top_k, id_space=id_space, vocab_size=2)
    choice = choose_layers(model, layers=None, all_layers=False)
    rows = np.zeros((len(positions), 2, top_k), model.row_dtype)
    valid = np.zeros(len(positions), np.bool_)
    places = np.array(positions, np.int64)
    fill_invalid(rows, valid, places, fill="spread", choice=choice, model=model)
    return rows


@pytest.mark.parametrize(("id_space", "top_k"), SHAPES)
def test_spread_loads_every_expert_alike(id_space: int, top_k: int) -> None:
    rows = filled(id_space, top_k, range(1000, 1000 + id_space))
    for layer in range(2):
        loads = np.bincount(rows[:, layer].ravel(), minlength=id_space)
        assert loads.tolist() == [top_k] * id_space
    assert all(len(set(row)) == top_k for row in rows.reshape(-1, top_k).tolist())


def test_seven_pads_share_no_expert() -> None:
    rows = filled(128, 8, range(100, 107))
    for layer in range(2):
        assert np.bincount(rows[:, layer].ravel()).max() == 1
