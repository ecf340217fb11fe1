"""Routing rows in memory: which are real, and the way between all layers and routed layers.

Legend: N rows, L layers (columns), K expert ids per layer. Pure; arrays go in, arrays come out.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sideband.errors import InvalidInput
from sideband.routing.loops import ANY_REPEATS, WORD_BYTES

RowArray = NDArray[np.uint8] | NDArray[np.uint16]

# Comparing all pairs of k ids is k²/2 vector operations, sorting is k log k scalar ones: they meet
# here. The widest public router (Nemotron-3-Super, 22) is well below.
_PAIRWISE_TOP_K_MAX: Final = 32
_BLOCK_IDS: Final = 1 << 18  # ids looked at together: they and their transpose stay in cache


def valid_rows(rows_NLK: RowArray, *, id_space: int) -> NDArray[np.bool_]:
    """Which of N rows can be the choice of a router: k distinct ids in each layer.

    A layer that repeats an id (an all-zero layer is one) makes its whole row invalid; with top-k 1
    no row can be told apart and all are valid. Order within the top-k does not matter. Ids are
    not range-checked here: an id outside ``id_space`` is a loud error of its own, not a gap.
    """
    assert rows_NLK.ndim == 3, "routing rows are [rows, layers, top-k]"
    count, layers, top_k = rows_NLK.shape
    valid_N = np.ones(count, np.bool_)
    if top_k > id_space:  # a pigeonhole: k ids cannot be distinct
        return ~valid_N
    if top_k == 1 or layers == 0:
        return valid_N
    step = max(1, _BLOCK_IDS // (layers * top_k))
    for start in range(0, count, step):
        ids_MK = rows_NLK[start : start + step].reshape(-1, top_k)
        if _are_distinct(ids_MK):
            continue
        repeats_M = _has_repeats(ids_MK)
        if repeats_M.any():  # rare: most blocks have no gap, and by rows costs more than in all
            valid_N[start : start + step] = ~repeats_M.reshape(-1, layers).any(axis=1)
    return valid_N


def _are_distinct(ids_MK: RowArray) -> bool:
    """Whether a compiled loop saw no list that holds an id twice. False says nothing.

    For lists that fill a word: top-8 of up to 256 experts, as most models route, or top-4 of more.
    """
    if ids_MK.shape[1] * ids_MK.itemsize != WORD_BYTES:
        return False
    loop = ANY_REPEATS.for_items(ids_MK.size)
    words_M = ids_MK.reshape(-1).view(np.uint64)
    return loop is not None and words_M.flags.aligned and not loop(words_M, 8 * ids_MK.itemsize)


def _has_repeats(ids_MK: RowArray) -> NDArray[np.bool_]:
    """Which of M lists of K ids hold an id twice."""
    top_k = ids_MK.shape[1]
    if top_k > _PAIRWISE_TOP_K_MAX:
        sorted_MK = np.sort(ids_MK, axis=1)
        found: NDArray[np.bool_] = (sorted_MK[:, 1:] == sorted_MK[:, :-1]).any(axis=1)
        return found
    columns_KM = np.ascontiguousarray(ids_MK.T)  # one contiguous vector per place in the top-k
    # Each pair of places has a distance: all pairs of one distance are one comparison, and what
    # they find is gathered by place, so that a single reduction is left.
    repeats_KM = columns_KM[1:] == columns_KM[:-1]
    room_KM = np.empty_like(repeats_KM)
    for distance in range(2, top_k):
        equal_KM = room_KM[: top_k - distance]
        np.equal(columns_KM[distance:], columns_KM[: top_k - distance], out=equal_KM)
        np.bitwise_or(repeats_KM[: top_k - distance], equal_KM, out=repeats_KM[: top_k - distance])
    repeats_M: NDArray[np.bool_] = np.bitwise_or.reduce(repeats_KM, axis=0)
    return repeats_M


def select_layers(rows_all_NLK: RowArray, layer_ids: Sequence[int]) -> RowArray:
    """The columns of ``layer_ids`` out of rows that hold every decoder layer, contiguous.

    The same array comes back when nothing is left out. Raises InvalidInput for an id beyond the
    columns: a model and an answer that differ in depth must not be read.
    """
    columns = rows_all_NLK.shape[1]
    if any(not 0 <= layer < columns for layer in layer_ids):
        raise InvalidInput("layer_ids", tuple(layer_ids), f"must lie in [0, {columns})")
    if list(layer_ids) == list(range(columns)):
        return rows_all_NLK
    # several times as fast as indexing with a list, and contiguous
    return rows_all_NLK.take(list(layer_ids), axis=1)


def scatter_layers(rows_NLK: RowArray, layer_ids: Sequence[int], num_layers: int) -> RowArray:
    """Rows of all ``num_layers`` layers: each column at its layer id, zeros elsewhere.

    By id, never by an offset: dense layers may lie anywhere. Zeros are what an engine leaves in
    a layer without a router. Raises InvalidInput when ids and columns do not belong together.
    """
    count, columns, top_k = rows_NLK.shape
    if len(layer_ids) != columns or len(set(layer_ids)) != columns:
        raise InvalidInput("layer_ids", tuple(layer_ids), f"must be {columns} different ids")
    if any(not 0 <= layer < num_layers for layer in layer_ids):
        raise InvalidInput("layer_ids", tuple(layer_ids), f"must lie in [0, {num_layers})")
    rows_all: RowArray = np.zeros((count, num_layers, top_k), rows_NLK.dtype)
    rows_all[:, list(layer_ids)] = rows_NLK
    return rows_all
