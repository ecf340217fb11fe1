"""The block encoding ``packed``: routing ids at the bits that their id space needs.

The low bytes of all ids stand together, then one plane of bits for each bit above them, so that
whole arrays are all it takes: at 512 ids a block is a ninth of its rows' bits in one plane, and
decoding is two passes over bytes. See docs/payload-format.md.

Legend: M ids of a block, row after row; W of them wanted.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sideband.model import ModelShape
from sideband.payload.columns import RowArray

_BYTE_BITS: Final = 8


def planes_of(model: ModelShape) -> int:
    """Bits of an id above its low byte."""
    return max(0, (model.id_space - 1).bit_length() - _BYTE_BITS)


def block_bytes(rows: int, model: ModelShape) -> int:
    """Bytes of a block of so many rows, exactly."""
    ids = rows * _ids_per_row(model)
    return ids + planes_of(model) * _plane_bytes(ids)


def rows_within(size_bytes: int, model: ModelShape) -> int:
    """How many rows fit into a block of ``size_bytes``; at least one."""
    planes = planes_of(model)
    bits = _BYTE_BITS * (size_bytes - planes)  # each plane ends with a byte of its own
    return max(1, bits // (_ids_per_row(model) * (_BYTE_BITS + planes)))


def parts_of(rows_NLK: RowArray, model: ModelShape) -> list[NDArray[np.uint8]]:
    """The block's bytes. The caller checks the ids: bits beyond the id space's are lost."""
    ids_M = rows_NLK.reshape(-1)
    parts = [ids_M.astype(np.uint8)]  # keeps the low byte
    if planes_of(model):
        high_M = (ids_M >> _BYTE_BITS).astype(np.uint8)
        parts += [
            np.packbits(high_M & (1 << plane), bitorder="little")
            for plane in range(planes_of(model))
        ]
    return parts


def decode_rows(
    stored: memoryview, rows: int, *, first: int, out_NLK: RowArray, model: ModelShape
) -> None:
    """Fill ``out_NLK`` with its N rows from row ``first`` of a block of ``rows`` rows.

    Raises ValueError on another size than that of the rows, spare bits that are set, and an id
    outside the id space among the rows that are wanted.
    """
    out_W = out_NLK.reshape(-1)
    ids, begin = rows * _ids_per_row(model), first * _ids_per_row(model)
    data = np.frombuffer(stored, np.uint8)
    if len(data) != block_bytes(rows, model):
        raise ValueError(f"{len(data)} bytes for {ids} ids of an id space of {model.id_space}")
    low_W = data[begin : begin + len(out_W)]
    if planes_of(model):
        out_W[:] = _high_bytes(data[ids:], ids, begin, len(out_W))
        np.left_shift(out_W, _BYTE_BITS, out=out_W)
        np.bitwise_or(out_W, low_W, out=out_W)
    else:
        out_W[:] = low_W
    if out_W.max(initial=0) >= model.id_space:
        raise ValueError(f"an id of {int(out_W.max())} in an id space of {model.id_space}")


def _high_bytes(data: NDArray[np.uint8], ids: int, begin: int, count: int) -> NDArray[np.uint8]:
    """What the planes in ``data`` say of the ids [begin, begin + count)."""
    high_W: NDArray[np.uint8] | None = None
    skipped = begin % _BYTE_BITS
    for plane, bits in enumerate(data.reshape(-1, _plane_bytes(ids))):
        if ids % _BYTE_BITS and bits[-1] >> ids % _BYTE_BITS:
            raise ValueError("spare bits are set")
        wanted = bits[begin // _BYTE_BITS : -(-(begin + count) // _BYTE_BITS)]
        flags_W = np.unpackbits(wanted, count=skipped + count, bitorder="little")[skipped:]
        if high_W is None:
            high_W = flags_W
        else:
            np.left_shift(flags_W, plane, out=flags_W)
            np.bitwise_or(high_W, flags_W, out=high_W)
    assert high_W is not None, "the caller has planes"
    return high_W


def _ids_per_row(model: ModelShape) -> int:
    layers, top_k = model.row_shape
    return layers * top_k


def _plane_bytes(ids: int) -> int:
    return -(-ids // _BYTE_BITS)
