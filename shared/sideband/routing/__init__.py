"""Routing: which layers have a router, and what their rows are."""

from sideband.routing.errors import ContradictoryConfig, DenseModel, UnknownArchitecture
from sideband.routing.layers import model_shape, routed_layers
from sideband.routing.rows import RowArray, scatter_layers, select_layers, valid_rows

__all__ = [
    "ContradictoryConfig",
    "DenseModel",
    "RowArray",
    "UnknownArchitecture",
    "model_shape",
    "routed_layers",
    "scatter_layers",
    "select_layers",
    "valid_rows",
]
