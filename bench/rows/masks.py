"""Sampling masks: bytes of real kept sets, and what packing and unpacking them costs."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Final, TypeVar
from unittest.mock import patch

import numpy as np
import orjson
from numpy.typing import NDArray

from bench.registry import Row
from bench.results import Claim, Curve, RowResult, Series
from bench.scale import Scale
from bench.timing import Timings, paired
from bench.workload import VOCAB_SIZE, kept_counts, kept_sets, sampled_tokens
from sideband.compiled import Loop, compile_loops
from sideband.masks.rows import MaskRows
from sideband.payload.encodings import (
    DEFAULT_ENCODINGS,
    MASK_ENCODINGS,
    MaskEncoding,
    mask_blocks,
)

SOURCE_ROW_BYTES: Final = 4.0  # the source's packed form: a start per token ...
SOURCE_ID_BYTES: Final = 2.25  # ... and 18 bits per kept id
PLAIN_ID_BYTES: Final = 4.0  # an int32 per kept id
LISTS: Final = "inline: JSON lists to arrays"
LIMIT: Final = "limit: memcpy of the decoded ids"
T = TypeVar("T")
Tokens = NDArray[np.int32]
Block = tuple[int, int, bytes]  # rows [first, last), stored bytes


def measure(scale: Scale) -> RowResult:
    """Every mask encoding against the source's packed form, JSON lists, and a memcpy of the ids."""
    rows = scale.pick(tiny=500, quick=200_000, full=1_000_000)
    masks = kept_sets(rows, vocab_size=VOCAB_SIZE, seed=3)
    sampled = sampled_tokens(masks, seed=4)
    ids = len(masks.ids_M)
    text = orjson.dumps([masks[row].tolist() for row in range(rows)])
    blocks = {name: encode(masks, sampled, one) for name, one in MASK_ENCODINGS.items()}
    has_numba = compile_loops()
    sides: dict[str, Callable[[], object]] = {}
    sizes = {LISTS: len(text), LIMIT: 4 * ids}
    for name, encoding in MASK_ENCODINGS.items():
        decoding = partial(decode, blocks[name], sampled, encoding)
        sides[f"{name}: encode"] = partial(encode, masks, sampled, encoding)
        if has_numba:
            sides[f"{name}: decode, checked"] = decoding
        sides[f"{name}: decode, checked, numpy only"] = partial(without_loops, decoding)
        stored = sum(len(block) for *_, block in blocks[name])
        sizes |= dict.fromkeys((side for side in sides if side.startswith(name)), stored)
    sides[LISTS] = lambda: from_lists(orjson.loads(text))
    sides[LIMIT] = masks.ids_M.copy
    timings = paired(sides, rounds=scale.rounds)
    return RowResult(
        name="masks",
        title="Sampling masks",
        setting=f"{rows} rows, {ids} kept ids ({_facts(rows)}), vocabulary {VOCAB_SIZE}, ids "
        "uniform over it (the hardest to compress), one core",
        measurements=[
            timings.measurement(name, size_bytes=sizes[name], units=ids / 1e6, unit="M ids/s")
            for name in sides
        ],
        claims=[
            claim
            for name in MASK_ENCODINGS
            for claim in _claims(name, sizes[f"{name}: encode"], rows, ids, timings)
        ],
        curves=[_by_vocabulary(scale)],
    )


def _claims(name: str, stored: int, rows: int, ids: int, timings: Timings) -> list[Claim]:
    """The default encoding has to reach the targets; the other one stands beside it."""
    is_default = name == DEFAULT_ENCODINGS.masks
    source_bytes = SOURCE_ROW_BYTES * rows + SOURCE_ID_BYTES * ids
    claims = [
        Claim(
            what=f"{name}: stored, of 4 B per token + 2.25 B per kept id",
            value=100 * stored / source_bytes,
            unit="%",
            target=65 if is_default else None,
            is_ceiling=is_default,
        ),
        Claim(
            what=f"{name}: stored, of 4 B per kept id",
            value=100 * stored / (PLAIN_ID_BYTES * ids),
            unit="%",
        ),
    ]
    for way, note in (("decode, checked", ""), ("decode, checked, numpy only", ", numpy only")):
        side = f"{name}: {way}"
        if side not in timings.seconds:
            continue
        claims.append(
            Claim(
                what=f"{name}: decoded on one core{note}",
                value=ids / timings.median(side) / 1e6,
                unit="M ids/s",
                target=200 if is_default and not note else None,
            )
        )
        claims.append(
            Claim(
                what=f"{name}: decodes faster than inline{note}",
                value=timings.ratio(LISTS, side),
                unit="×",
            )
        )
    return claims


def encode(
    masks: MaskRows, sampled: Tokens, encoding: MaskEncoding, vocab_size: int = VOCAB_SIZE
) -> list[Block]:
    """The blocks of the rows, as the writer makes them."""
    return [
        (
            first,
            last,
            b"".join(
                encoding.encode_block(masks.slice(first, last), sampled[first:last], vocab_size)
            ),
        )
        for first, last in pairwise(mask_blocks(masks, vocab_size, encoding))
    ]


def decode(
    blocks: list[Block], sampled: Tokens, encoding: MaskEncoding, vocab_size: int = VOCAB_SIZE
) -> MaskRows:
    """All rows again, every check on."""
    return MaskRows.concatenate(
        [
            encoding.decode_rows(
                memoryview(stored), last - first, vocab_size, first=0, sampled_N=sampled[first:last]
            )
            for first, last, stored in blocks
        ]
    )


def without_loops(work: Callable[[], T]) -> T:
    """The same where numba is not installed."""
    with patch.object(Loop, "for_items", lambda loop, count: None):
        return work()


def from_lists(lists: list[list[int]]) -> MaskRows:
    """What an inline path does with the lists of a JSON body."""
    counts = np.fromiter(map(len, lists), np.int64, len(lists))
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return MaskRows(starts, np.array([one for row in lists for one in row], np.int32))


def _facts(rows: int) -> str:
    counts = kept_counts(rows, seed=3)
    return (
        f"mean {counts.mean():.1f}, median {np.median(counts):.0f}, "
        f"p99 {np.percentile(counts, 99):.0f}, {np.mean(counts == 1):.0%} of rows with one"
    )


def _by_vocabulary(scale: Scale) -> Curve:
    """Cost must follow the kept ids, never the vocabulary."""
    rows = scale.pick(tiny=50, quick=20_000, full=100_000)
    vocabularies = scale.pick(
        tiny=[2_000, 8_000],
        quick=[2_000, 16_000, VOCAB_SIZE, 1_000_000],
        full=[2_000, 16_000, 64_000, VOCAB_SIZE, 500_000, 1_000_000, 4_000_000],
    )
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in MASK_ENCODINGS}
    for vocab_size in vocabularies:
        masks = kept_sets(rows, vocab_size=vocab_size, seed=5)
        sampled = sampled_tokens(masks, seed=6)
        sides: dict[str, Callable[[], object]] = {}
        for name, one in MASK_ENCODINGS.items():
            blocks = encode(masks, sampled, one, vocab_size)
            sides[name] = partial(decode, blocks, sampled, one, vocab_size)
        timings = paired(sides, rounds=scale.rounds)
        for name in sides:
            points[name].append((vocab_size, timings.median(name) / len(masks.ids_M) * 1e9))
    return Curve(
        name="masks-by-vocabulary",
        title="Decoding one kept id",
        x_label="vocabulary size",
        y_label="ns per kept id",
        log="x",
        series=[Series(name=name, points=found) for name, found in points.items()],
    )


ROWS: Final = [Row("masks", measure)]
