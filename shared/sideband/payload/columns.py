"""What a writer takes: the rows of one request, one choice at a time, by sequence position.

Legend: N rows, L routed layers, K = top-k.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sideband.masks.rows import MaskRows

RowArray = NDArray[np.uint8] | NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingRows:
    """Routing of the positions [pos, pos + N), routed layers only, in the model's shape and dtype.

    May hold invalid rows: the writer leaves them out as gaps.
    """

    pos: int
    rows_NLK: RowArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskColumn:
    """Kept sets of the sampled tokens at positions [pos, pos + N), and those tokens themselves.

    A row that keeps ids must keep its sampled token. A row without ids means "no replay": the
    writer leaves it out as a gap.
    """

    pos: int
    masks: MaskRows
    sampled_token_ids_N: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChoicePayload:
    """One choice of a request. Either part may be absent or empty."""

    choice: int
    routing: RoutingRows | None
    masks: MaskColumn | None
