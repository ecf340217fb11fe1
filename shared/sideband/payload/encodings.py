"""How a block holds rows: a registry per kind of field, so that a format may grow by an entry.

An encoding turns rows into the bytes of one self-contained block and back. ``raw`` is marked as
``is_raw``: its stored bytes are the rows, so a reader may read whole blocks where they shall lie.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from sideband.masks import csr_bits
from sideband.masks.bits import width_of
from sideband.masks.rows import MaskRows
from sideband.payload.columns import RowArray
from sideband.payload.layout import BLOCK_BYTES_TARGET, Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingEncoding:
    """Routing rows [N, layers, top-k] as blocks.

    ``decode_block`` fills ``out`` (C-contiguous, the block's rows) and raises ValueError on bytes
    that no writer makes. Stored bytes are lent: no decoder keeps a view of them.
    """

    name: str
    is_raw: bool
    encode_block: Callable[[RowArray], list[Buffer]]
    decode_block: Callable[[memoryview, RowArray], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskEncoding:
    """Kept sets as blocks.

    ``decode_block(stored, rows, vocab_size)`` raises InvalidInput on bytes that no writer makes.
    """

    name: str
    encode_block: Callable[[MaskRows, int], list[Buffer]]
    decode_block: Callable[[memoryview, int, int], MaskRows]


def _encode_raw(rows_NLK: RowArray) -> list[Buffer]:
    return [np.ascontiguousarray(rows_NLK).data.cast("B")]


def _decode_raw(stored: memoryview, out: RowArray) -> None:
    out.data.cast("B")[:] = stored


def _encode_csr_bits(masks: MaskRows, vocab_size: int) -> list[Buffer]:
    return [part.data for part in csr_bits.encode_block(masks, vocab_size)]


RAW: Final = RoutingEncoding(
    name="raw", is_raw=True, encode_block=_encode_raw, decode_block=_decode_raw
)
CSR_BITS: Final = MaskEncoding(
    name="csr-bits", encode_block=_encode_csr_bits, decode_block=csr_bits.decode_block
)
ROUTING_ENCODINGS: Final[Mapping[str, RoutingEncoding]] = MappingProxyType({RAW.name: RAW})
MASK_ENCODINGS: Final[Mapping[str, MaskEncoding]] = MappingProxyType({CSR_BITS.name: CSR_BITS})


def routing_blocks(rows: int, row_size_bytes: int) -> list[int]:
    """Boundaries that cut ``rows`` into blocks of about the target size, at least one row each."""
    step = max(1, BLOCK_BYTES_TARGET // row_size_bytes)
    return [*range(0, rows, step), rows]


def mask_blocks(masks: MaskRows, vocab_size: int) -> list[int]:
    """The same for kept sets, whose rows differ in size."""
    width = width_of(vocab_size)
    # Bytes before each row: monotone, so each next boundary is one binary search away.
    before_N = masks.starts_N * width // 8 + csr_bits.START_BYTES * np.arange(len(masks) + 1)
    bounds = [0]
    while bounds[-1] < len(masks):
        # A block has one start more than rows, and its last byte may be half full.
        limit = int(before_N[bounds[-1]]) + BLOCK_BYTES_TARGET - csr_bits.START_BYTES - 1
        reached = int(np.searchsorted(before_N, limit, side="right")) - 1
        bounds.append(max(reached, bounds[-1] + 1))
    return bounds
