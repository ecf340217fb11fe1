"""The ``.npy`` bytes in which vLLM sends routing rows, base64 in JSON. Parsed strictly.

Only what an engine sends is read: format 1 or 2, uint8 or uint16, C order, three dimensions,
exactly as many bytes as the shape asks for. numpy's own reader is never used on them: its header
goes through an expression parser and may ask for objects.

Errors: InvalidInlineRouting (InvalidInput).
"""

import re
import struct
from math import prod
from typing import Final, cast

import numpy as np

from sideband.engines.base64_text import decode_base64, encode_base64
from sideband.engines.long_text import LongText
from sideband.errors import InvalidInput
from sideband.routing.rows import RowArray

SHOWN_CHARACTERS: Final = 64
NPY_HEADER_BYTES_MAX: Final = 4096  # numpy writes 128; later fields must still fit
RowDtype = np.dtype[np.uint8] | np.dtype[np.uint16]

_MAGIC: Final = b"\x93NUMPY"
_DTYPES: Final[dict[str, RowDtype]] = {
    "|u1": np.dtype(np.uint8),
    "<u1": np.dtype(np.uint8),
    "<u2": np.dtype("<u2"),
}
_HEADER: Final = re.compile(
    r"\s*\{\s*'descr'\s*:\s*'(?P<dtype>[|<>=]?[a-z]\d{1,2})'\s*,"
    r"\s*'fortran_order'\s*:\s*(?P<fortran>True|False)\s*,"
    r"\s*'shape'\s*:\s*\((?P<shape>[0-9, ]*)\)\s*,?\s*\}\s*",
    re.ASCII,
)


class InvalidInlineRouting(InvalidInput):
    """Inline routing that cannot be what this model did with this sequence."""

    def __init__(self, value: object, rule: str) -> None:
        super().__init__("routed_experts", value, rule)


def decode_npy_base64(text: str | LongText, *, bytes_max: int) -> RowArray:
    """Routing rows [rows, layers, top-k] from one choice's ``routed_experts``; read-only.

    ``bytes_max`` bounds the rows themselves and is checked on the text's length, before anything
    is decoded. Raises InvalidInlineRouting.
    """
    if not isinstance(text, (str, LongText)):
        raise InvalidInlineRouting(type(text).__name__, "must be a base64 string")
    if len(text) // 4 * 3 > bytes_max + NPY_HEADER_BYTES_MAX:
        raise InvalidInlineRouting(
            f"{len(text)} characters", f"must hold {bytes_max} bytes at most"
        )
    try:
        data = decode_base64(text)
    except ValueError as exc:
        raise InvalidInlineRouting(begin_of(text), "must be base64") from exc
    start = _header_stop(data)
    dtype, shape = _parse_header(bytes(data[:start]))
    size_bytes = prod(shape) * dtype.itemsize
    if len(data) - start != size_bytes or size_bytes > bytes_max:
        raise InvalidInlineRouting(
            f"{len(data) - start} bytes of {dtype} rows {shape}",
            f"must be {size_bytes} bytes, at most {bytes_max}",
        )
    return cast("RowArray", np.frombuffer(data, dtype, offset=start).reshape(shape))


def _header_stop(data: memoryview) -> int:
    """Where the rows begin."""
    if len(data) < 10 or bytes(data[:6]) != _MAGIC or data[6] not in {1, 2} or data[7] != 0:
        raise InvalidInlineRouting(bytes(data[:12]), "must begin as npy format 1.0 or 2.0")
    layout = struct.Struct("<H" if data[6] == 1 else "<I")
    if len(data) < 8 + layout.size:
        raise InvalidInlineRouting(bytes(data[:12]), "must hold a whole npy header")
    (header_bytes,) = layout.unpack_from(data, 8)
    stop: int = 8 + layout.size + header_bytes
    if header_bytes > NPY_HEADER_BYTES_MAX or stop > len(data):
        raise InvalidInlineRouting(header_bytes, "must be a header that fits the data")
    return stop


def _parse_header(header: bytes) -> tuple[RowDtype, list[int]]:
    text = header[10 if header[6] == 1 else 12 :].decode("latin-1")
    match = _HEADER.fullmatch(text)
    if match is None:
        raise InvalidInlineRouting(text.strip()[:100], "must be a plain npy header")
    if match["dtype"] not in _DTYPES:
        raise InvalidInlineRouting(match["dtype"], "must be uint8 or little-endian uint16")
    if match["fortran"] == "True":
        raise InvalidInlineRouting("fortran_order", "must be C order")
    sizes = [size.strip() for size in match["shape"].split(",")]
    # ten digits hold every legal size, and keep a hostile header from a huge integer
    if len(sizes) != 3 or not all(size.isdigit() and len(size) <= 10 for size in sizes):
        raise InvalidInlineRouting(match["shape"], "must be (rows, layers, top_k)")
    return _DTYPES[match["dtype"]], [int(size) for size in sizes]


def begin_of(text: str | LongText) -> str:
    """What an error shows of a text."""
    return text[:SHOWN_CHARACTERS] if isinstance(text, str) else text.begin(SHOWN_CHARACTERS)


def encode_npy_base64(rows_NLK: RowArray) -> str:
    """One choice's ``routed_experts`` as vLLM would send these rows."""
    return b"".join(npy_base64(rows_NLK).parts).decode("ascii")


def npy_base64(rows_NLK: RowArray) -> LongText:
    """The same in parts."""
    assert rows_NLK.ndim == 3, "routing rows are [rows, layers, top-k]"
    descr = "|u1" if rows_NLK.dtype == np.uint8 else "<u2"
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {rows_NLK.shape}, }}"
    padded = text.ljust(118 - 1) + "\n"  # the rows begin at byte 128, as numpy aligns them
    head = _MAGIC + b"\x01\x00" + struct.pack("<H", len(padded)) + padded.encode("ascii")
    little = np.ascontiguousarray(rows_NLK, dtype=descr)
    return encode_base64(head, little.reshape(-1).view(np.uint8).data)
