"""Rows that a correct engine could have sent, and whole requests of them.

Everything follows from the generator that is passed in, so a seed in a test's name replays it.

Legend: N rows, L routed layers, K = top-k.
"""

import numpy as np
from numpy.typing import NDArray

from sideband.masks.rows import MaskRows
from sideband.masks.rules import row_of_each_id
from sideband.model import ModelShape
from sideband.payload.columns import ChoicePayload, MaskColumn, RoutingRows, RowArray

KEPT_IDS_MAX = 8  # per row, unless a caller wants more


def random_routing(rng: np.random.Generator, rows: int, model: ModelShape) -> RowArray:
    """[N, L, K] in the model's dtype, with K distinct ids in each layer."""
    ids = _distinct(rng, (rows, len(model.layer_ids)), model.top_k, model.id_space)
    turn = rng.integers(model.id_space, size=(rows, len(model.layer_ids), 1))
    turned = (ids + turn) % model.id_space
    return turned.astype(np.uint8) if model.id_space <= 256 else turned.astype(np.uint16)


def with_gaps(rows_NLK: RowArray, rows: list[int]) -> RowArray:
    """A copy whose ``rows`` are all zero, as an engine leaves a row that it lost (top-k > 1)."""
    copy = rows_NLK.copy()
    copy[rows] = 0
    return copy


def random_masks(
    rng: np.random.Generator,
    rows: int,
    model: ModelShape,
    *,
    kept_max: int = KEPT_IDS_MAX,
    empty_fraction: float = 0.1,
) -> tuple[MaskRows, NDArray[np.int32]]:
    """Kept sets of 1 to ``kept_max`` ids, some rows empty; and sampled tokens, members of them."""
    width = min(kept_max, model.vocab_size)
    counts_N = rng.integers(1, width + 1, size=rows)
    counts_N[rng.random(rows) < empty_fraction] = 0
    ids = _distinct(rng, (rows,), width, model.vocab_size).astype(np.int32)
    starts_N = np.concatenate(([0], np.cumsum(counts_N))).astype(np.int64)
    kept = np.arange(width)[None, :] < counts_N[:, None]
    place_N = rng.integers(np.maximum(counts_N, 1))  # of an empty row: any token
    return MaskRows(starts_N, ids[kept]), ids[np.arange(rows), place_N]


def random_scores(rng: np.random.Generator, masks: MaskRows) -> NDArray[np.float32]:
    """[M]: a logprob for each kept id, normalised in its row as an engine's are."""
    weights_M = rng.exponential(size=len(masks.ids_M)) + 1e-6
    counts_N = np.diff(masks.starts_N)
    totals_N = np.bincount(row_of_each_id(masks), weights_M, minlength=len(masks))
    return np.log(weights_M / np.repeat(totals_N, counts_N)).astype(np.float32)


def random_choice(
    rng: np.random.Generator,
    model: ModelShape,
    *,
    prompt_tokens: int,
    completion_tokens: int,
    prompt_start: int = 0,
    choice: int = 0,
    gaps: tuple[int, ...] = (),
    kept_max: int = KEPT_IDS_MAX,
    with_scores: bool = False,
) -> ChoicePayload:
    """One choice of a request of N = prompt + completion tokens.

    Routing covers [prompt_start, N − 1) without the positions in ``gaps``, masks [prompt, N),
    each kept id with a logprob if they are ``with_scores``.
    """
    tokens = prompt_tokens + completion_tokens
    rows = random_routing(rng, max(0, tokens - 1 - prompt_start), model)
    masks, sampled_N = random_masks(rng, completion_tokens, model, kept_max=kept_max)
    return ChoicePayload(
        choice=choice,
        routing=RoutingRows(
            pos=prompt_start, rows_NLK=with_gaps(rows, [pos - prompt_start for pos in gaps])
        ),
        masks=MaskColumn(
            pos=prompt_tokens,
            masks=masks,
            sampled_token_ids_N=sampled_N,
            logprobs_M=random_scores(rng, masks) if with_scores else None,
        ),
    )


def _distinct(
    rng: np.random.Generator, lists: tuple[int, ...], count: int, below: int
) -> NDArray[np.int64]:
    """Lists of ``count`` ascending distinct ids below ``below``, without a draw per id space."""
    loose = np.sort(rng.integers(below - count + 1, size=(*lists, count)), axis=-1)
    return loose + np.arange(count)
