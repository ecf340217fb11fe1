"""What a writer takes: the rows of one request, one choice at a time, by sequence position.

Legend: N rows, L routed layers, K = top-k.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sideband.masks.rows import MaskRows, ScoreRows

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
    writer leaves it out as a gap. ``logprobs_M``: what the engine gave each kept id, in the order
    of the ids, where it reports that; a score of -inf says that an id is never drawn.
    """

    pos: int
    masks: MaskRows
    sampled_token_ids_N: NDArray[np.int32]
    logprobs_M: NDArray[np.float32] | None = None

    @property
    def scores(self) -> ScoreRows | None:
        """The logprobs as rows: by construction as long as the kept sets."""
        if self.logprobs_M is None:
            return None
        return ScoreRows(self.masks.starts_N, self.logprobs_M)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChoicePayload:
    """One choice of a request. Either part may be absent or empty."""

    choice: int
    routing: RoutingRows | None
    masks: MaskColumn | None
