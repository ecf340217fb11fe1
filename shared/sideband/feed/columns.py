"""Arrays and bytes: the leaves of the step format. Nothing is allocated before it is checked.

Legend: T values, R runs, E tokens that travel.
"""

from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from sideband.batch.columns import Column, Runs
from sideband.feed.errors import MalformedStep

F32 = np.dtype("<f4")
I32 = np.dtype("<i4")
U32 = np.dtype("<u4")
U8 = np.dtype(np.uint8)

Scalar = TypeVar("Scalar", bound=np.generic)


class RunsWire(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A run-length column: 4-byte values and u32 lengths."""

    values: memoryview
    lengths: memoryview


def to_bytes(array: NDArray[np.generic], dtype: np.dtype[np.generic]) -> memoryview:
    """The array's values as little-endian bytes; no copy where it already lies so."""
    flat = np.ascontiguousarray(array, dtype).reshape(-1)
    return flat.view(np.uint8).data


def from_bytes(
    element: str, data: memoryview, dtype: np.dtype[Scalar], *, count: int | None = None
) -> NDArray[Scalar]:
    """A read-only view of ``count`` values (any number without it); shares the body's memory."""
    if count is not None and data.nbytes != count * dtype.itemsize:
        rule = f"holds {data.nbytes} bytes, must hold {count} × {dtype.itemsize}"
        raise MalformedStep(element, rule)
    if data.nbytes % dtype.itemsize:
        rule = f"holds {data.nbytes} bytes, must be a multiple of {dtype.itemsize}"
        raise MalformedStep(element, rule)
    view = np.frombuffer(data, dtype)
    view.flags.writeable = False
    return view


def int32(element: str, data: memoryview, *, count: int | None = None) -> NDArray[np.int32]:
    """Values of an int32 column."""
    return from_bytes(element, data, I32, count=count).view(np.int32)


def float32(element: str, data: memoryview, *, count: int | None = None) -> NDArray[np.float32]:
    """Values of a float32 column, bitwise."""
    return from_bytes(element, data, F32, count=count).view(np.float32)


def uint32(element: str, data: memoryview, *, count: int | None = None) -> NDArray[np.int64]:
    """Values of a u32 column, widened so that sums cannot overflow."""
    return from_bytes(element, data, U32, count=count).astype(np.int64)


def pack_bits(mask_E: NDArray[np.bool_]) -> bytes:
    """One bit per token, lowest bit first."""
    return np.packbits(mask_E, bitorder="little").tobytes()


def unpack_bits(element: str, data: memoryview, *, count: int) -> NDArray[np.bool_]:
    """``count`` bits; spare bits must be 0, so that one mask has one encoding."""
    packed = from_bytes(element, data, U8, count=(count + 7) // 8)
    bits = np.unpackbits(packed, bitorder="little")
    if bits[count:].any():
        raise MalformedStep(element, "spare bits must be 0")
    return bits[:count].view(np.bool_)


def encode_runs(runs: Runs) -> RunsWire:
    """A run-length column for the wire."""
    dtype = F32 if runs.values_R.dtype == np.float32 else I32
    return RunsWire(to_bytes(runs.values_R, dtype), to_bytes(runs.lengths_R, U32))


def decode_runs(element: str, wire: RunsWire, *, count: int, is_float: bool) -> Runs:
    """Runs that cover exactly ``count`` tokens; their sum is checked before anything expands."""
    lengths = uint32(f"{element}.lengths", wire.lengths)
    read = float32 if is_float else int32
    values: Column = read(f"{element}.values", wire.values, count=len(lengths))
    if (lengths < 1).any():
        raise MalformedStep(f"{element}.lengths", "each run must cover at least one token")
    total = int(lengths.sum())
    if total != count:
        raise MalformedStep(f"{element}.lengths", f"cover {total} tokens, must cover {count}")
    return Runs(values, lengths.astype(np.int32))
