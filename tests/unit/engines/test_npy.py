"""Routing rows as npy bytes in base64: round trips, numpy's own bytes, and every refusal."""

import base64
import io
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sideband.engines.npy import (
    NPY_HEADER_BYTES_MAX,
    InvalidInlineRouting,
    decode_npy_base64,
    encode_npy_base64,
)
from sideband.routing.rows import RowArray


def by_numpy(array: NDArray[np.generic], version: tuple[int, int] = (1, 0)) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=version, allow_pickle=False)
    return buffer.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def with_header(header: str, body: bytes = b"", *, version: bytes = b"\x01\x00") -> str:
    raw = header.encode("latin-1")
    size = struct.pack("<H" if version[0] == 1 else "<I", len(raw))
    return text(b"\x93NUMPY" + version + size + raw + body)


@st.composite
def row_arrays(draw: st.DrawFn) -> RowArray:
    shape = (draw(st.integers(0, 20)), draw(st.integers(1, 5)), draw(st.integers(1, 9)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    if draw(st.booleans()):
        return rng.integers(0, 1 << 8, shape, dtype=np.uint8)
    return rng.integers(0, 1 << 16, shape, dtype=np.uint16)


@given(row_arrays())
def test_rows_survive_and_are_the_bytes_that_numpy_writes(rows: RowArray) -> None:
    encoded = encode_npy_base64(rows)
    assert base64.b64decode(encoded) == by_numpy(rows)
    decoded = decode_npy_base64(encoded, bytes_max=rows.nbytes)
    assert decoded.dtype == rows.dtype
    assert np.array_equal(decoded, rows)


@given(row_arrays())
def test_format_2_is_read_too(rows: RowArray) -> None:
    decoded = decode_npy_base64(text(by_numpy(rows, (2, 0))), bytes_max=rows.nbytes)
    assert np.array_equal(decoded, rows)


def test_rows_that_are_not_contiguous_are_encoded_as_they_read() -> None:
    rows = np.arange(24, dtype=np.uint16).reshape(4, 3, 2)[::2, 1:]
    assert np.array_equal(decode_npy_base64(encode_npy_base64(rows), bytes_max=99), rows)


ROWS = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
HEADER = "{'descr': '|u1', 'fortran_order': False, 'shape': (4, 3, 2), }"
BODY = bytes(24)

REFUSED = {
    "not text": (None, "must be a base64 string"),
    "not base64": ("a$$=", "must be base64"),
    "not ascii": ("é" * 8, "must be base64"),
    "half a quantum": ("abcde", "must be base64"),
    "empty": ("", "format 1.0 or 2.0"),
    "other magic": (text(b"PK\x03\x04" + bytes(40)), "format 1.0 or 2.0"),
    "format 3": (text(by_numpy(ROWS, (3, 0))), "format 1.0 or 2.0"),
    "minor version": (with_header(HEADER, BODY, version=b"\x01\x01"), "format 1.0 or 2.0"),
    "short of a header size": (text(b"\x93NUMPY\x02\x00\x01\x00"), "a whole npy header"),
    "header beyond the data": (text(b"\x93NUMPY\x01\x00\xff\x0fx"), "fits the data"),
    "huge header": (with_header(" " * (NPY_HEADER_BYTES_MAX + 1)), "fits the data"),
    "objects": (with_header(HEADER.replace("|u1", "|O8"), BODY), "plain npy header"),
    "signed": (with_header(HEADER.replace("|u1", "|i1"), BODY), "uint8 or little-endian uint16"),
    "wide": (with_header(HEADER.replace("|u1", "<u4"), BODY), "uint8 or little-endian uint16"),
    "big-endian": (with_header(HEADER.replace("|u1", ">u2"), BODY), "uint8 or little-endian"),
    "structured": (with_header(HEADER.replace("'|u1'", "[('a', '|u1')]"), BODY), "plain npy"),
    "fortran order": (with_header(HEADER.replace("False", "True"), BODY), "C order"),
    "code": (with_header("{'descr': __import__('os').getcwd()}"), "plain npy header"),
    "two dimensions": (with_header(HEADER.replace("(4, 3, 2)", "(8, 3)"), BODY), "(rows, layers"),
    "four dimensions": (with_header(HEADER.replace("(4,", "(1, 4,"), BODY), "(rows, layers"),
    "negative": (with_header(HEADER.replace("(4,", "(-4,"), BODY), "plain npy header"),
    "no number": (with_header(HEADER.replace("(4, 3, 2)", "(4, 3, )"), BODY), "(rows, layers"),
    "huge number": (with_header(HEADER.replace("(4,", f"({10**40},"), BODY), "(rows, layers"),
    "more than it holds": (with_header(HEADER.replace("(4,", "(5,"), BODY), "must be 30 bytes"),
    "less than it holds": (with_header(HEADER, BODY + b"\0"), "must be 24 bytes"),
    "a promise of gigabytes": (with_header(HEADER.replace("(4,", "(999999999,"), BODY), "bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused(name: str) -> None:
    value, part = REFUSED[name]
    with pytest.raises(InvalidInlineRouting) as caught:
        decode_npy_base64(value, bytes_max=100)  # type: ignore[arg-type]  # None on purpose
    assert part in str(caught.value)
    assert caught.value.field == "routed_experts"


def test_too_many_bytes_are_refused_before_they_are_decoded() -> None:
    encoded = encode_npy_base64(ROWS)
    assert len(decode_npy_base64(encoded, bytes_max=24)) == 4
    with pytest.raises(InvalidInlineRouting, match="at most 23"):
        decode_npy_base64(encoded, bytes_max=23)
    with pytest.raises(InvalidInlineRouting, match="must hold 10 bytes at most"):
        decode_npy_base64("!" * 100_000, bytes_max=10)


@given(st.binary(max_size=80), st.integers(0, 79))
def test_mutated_bytes_are_read_right_or_refused(noise: bytes, at: int) -> None:
    data = bytearray(by_numpy(ROWS))
    data[at : at + len(noise)] = noise
    try:
        rows = decode_npy_base64(text(bytes(data)), bytes_max=200)
    except InvalidInlineRouting:
        return
    assert rows.nbytes <= 200
    assert rows.tobytes() == bytes(data)[-rows.nbytes or len(data) :]
