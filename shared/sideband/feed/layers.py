"""Which routing columns a rank gets, and what fills the rows that have none.

Legend: N rows, L columns (layers) out, K experts per layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sideband.errors import InvalidInput
from sideband.model import ModelShape

Fill = Literal["zeros", "spread"]
RowArray = NDArray[np.uint8] | NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """``layer_ids`` are the decoder layers of the columns out; column ``targets[i]`` takes column
    ``sources[i]`` of the payload's. ``is_identity``: rows can be read in place."""

    layer_ids: tuple[int, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    is_identity: bool


def choose_layers(
    model: ModelShape, *, layers: Sequence[int] | None, all_layers: bool
) -> LayerChoice:
    """The columns for a pipeline stage (``layers``, decoder layer ids) or the whole model.

    Compact: only layers with a router. With ``all_layers`` every wanted layer has a column, zeros
    where it has no router. Raises InvalidInput for a layer that the model does not have.
    """
    wanted = tuple(range(model.num_layers)) if layers is None else tuple(layers)
    if len(set(wanted)) != len(wanted) or not all(0 <= i < model.num_layers for i in wanted):
        rule = f"must be unique and lie in [0, {model.num_layers})"
        raise InvalidInput("layers", wanted, rule)
    column_of = {layer: column for column, layer in enumerate(model.layer_ids)}
    chosen = wanted if all_layers else tuple(layer for layer in wanted if layer in column_of)
    pairs = [(column_of[layer], i) for i, layer in enumerate(chosen) if layer in column_of]
    return LayerChoice(
        layer_ids=chosen,
        sources=tuple(source for source, _ in pairs),
        targets=tuple(target for _, target in pairs),
        is_identity=chosen == model.layer_ids,
    )


def place_rows(rows_NLK: RowArray, out_NLK: RowArray, choice: LayerChoice) -> None:
    """Copy the chosen columns of whole rows into their places."""
    if choice.is_identity:
        out_NLK[...] = rows_NLK
    else:
        out_NLK[:, choice.targets] = rows_NLK[:, choice.sources]


def fill_invalid(
    out_NLK: RowArray,
    valid_N: NDArray[np.bool_],
    positions_N: NDArray[np.int64],
    *,
    fill: Fill,
    choice: LayerChoice,
    model: ModelShape,
) -> None:
    """Fill the rows that are gaps, pads or without replay; the one function for both forms.

    "zeros" leaves them as they are allocated. "spread" gives each K distinct experts, neighbours
    and layers different ones, and every expert of a layer equally many of a long run of rows, so
    that no dispatcher sees a skewed load.
    """
    if fill == "zeros":
        return
    invalid = ~valid_N
    stride = max(1, model.id_space // model.top_k)
    places = np.arange(model.top_k) * stride
    # One on per position: a larger step would share a divisor with the space and leave experts out.
    bases = positions_N[invalid][:, None] + np.array(choice.sources, np.int64)
    ids = (bases[:, :, None] + places) % model.id_space
    block = out_NLK[invalid]
    block[:, choice.targets] = ids.astype(out_NLK.dtype)
    out_NLK[invalid] = block
