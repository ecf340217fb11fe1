"""The forms in which servers send inline routing rows, all read into one array. Pure.

- a string: base64 of ``.npy`` bytes, as vLLM sends it;
- an object ``{data, shape, dtype, start}``: base64 of the bare bytes in C order. ``start`` is the
  position of the first row, and may be left out;
- an array: what an adapter has made of a form of its own.

Either string may be a ``LongText``: the same in parts.

Errors: InvalidInlineRouting (InvalidInput).
"""

from collections.abc import Mapping
from math import prod
from typing import Any, Final, cast

import numpy as np

from sideband.engines.base64_text import decode_base64
from sideband.engines.long_text import LongText
from sideband.engines.npy import (
    InvalidInlineRouting,
    RowDtype,
    begin_of,
    decode_npy_base64,
    npy_base64,
)
from sideband.routing.rows import RowArray

RoutingText = str | LongText
RoutingValue = RoutingText | Mapping[str, Any] | RowArray

_DTYPES: Final[Mapping[str, RowDtype]] = {
    "uint8": np.dtype(np.uint8),
    "|u1": np.dtype(np.uint8),
    "uint16": np.dtype("<u2"),
    "<u2": np.dtype("<u2"),
}


def decode_routing(value: RoutingValue, *, bytes_max: int) -> tuple[RowArray, int | None]:
    """Rows [rows, layers, top-k] and, where the form says so, the position of the first one.

    ``bytes_max`` bounds the rows and is checked before anything is decoded. Raises
    InvalidInlineRouting.
    """
    if isinstance(value, np.ndarray):
        return value, None
    if isinstance(value, Mapping):
        return _decode_object(value, bytes_max=bytes_max)
    return decode_npy_base64(value, bytes_max=bytes_max), None


def routing_text(value: RoutingValue, rows: RowArray) -> RoutingText:
    """The string form of ``rows``, which ``value`` was decoded to."""
    return value if isinstance(value, (str, LongText)) else text_of(rows)


def text_of(rows: RowArray) -> RoutingText:
    """The string form of ``rows``; in parts when they are many."""
    text = npy_base64(rows)
    return text if len(text.parts) > 1 else text.parts[0].decode("ascii")


def routing_size_bytes(value: RoutingValue | None) -> int:
    """About how many bytes there are to decode or encode."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        data = value.get("data")
        return len(data) if isinstance(data, (str, LongText)) else 0
    return 0 if value is None else len(value)


def _decode_object(value: Mapping[str, Any], *, bytes_max: int) -> tuple[RowArray, int | None]:
    data, shape, start = value.get("data"), value.get("shape"), value.get("start")
    dtype = _DTYPES.get(str(value.get("dtype")))
    if dtype is None:
        raise InvalidInlineRouting(value.get("dtype"), "must have dtype uint8 or uint16")
    if (
        not isinstance(shape, list)
        or len(shape) != 3
        or not all(type(size) is int and 0 <= size < 1 << 32 for size in shape)
    ):
        raise InvalidInlineRouting(shape, "must have a shape (rows, layers, top_k)")
    if start is not None and (type(start) is not int or start < 0):
        raise InvalidInlineRouting(start, "must start at a position from 0 on")
    size_bytes = prod(shape) * dtype.itemsize
    # Base64 has four characters for three bytes: nothing is decoded that the shape does not ask.
    characters = -(-size_bytes // 3) * 4
    if not isinstance(data, (str, LongText)) or size_bytes > bytes_max or len(data) != characters:
        raise InvalidInlineRouting(
            f"{dtype} rows {shape}", f"must have data of {size_bytes} bytes, at most {bytes_max}"
        )
    try:
        raw = decode_base64(data)
    except ValueError as exc:
        raise InvalidInlineRouting(begin_of(data), "must be base64") from exc
    if len(raw) != size_bytes:
        raise InvalidInlineRouting(f"{len(raw)} bytes", f"must be {size_bytes} bytes of rows")
    return cast("RowArray", np.frombuffer(raw, dtype).reshape(shape)), start
