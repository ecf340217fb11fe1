"""Base64 of large arrays, a part at a time: no call holds the interpreter long. Pure."""

import base64
from collections.abc import Iterator
from typing import Final

import numpy as np

from sideband.engines.long_text import LongText, slices_of

SLICE_CHARACTERS: Final = 1 << 20  # about a millisecond
SLICE_BYTES: Final = SLICE_CHARACTERS // 4 * 3

assert SLICE_CHARACTERS % 4 == 0, "parts are whole groups of four characters"
assert SLICE_BYTES % 3 == 0, "and what they stand for is whole groups of three bytes"


def decode_base64(text: str | LongText) -> memoryview:
    """The bytes, read-only. Raises ValueError for anything else."""
    characters = len(text)
    if characters % 4:
        raise ValueError("is not of whole groups of four characters")
    # Not zeroed first: that would touch all of it in one call.
    data: memoryview = np.empty(characters // 4 * 3, np.uint8).data
    at = stop = 0
    for piece in slices_of(text, SLICE_CHARACTERS):
        padded = piece.find("=") if isinstance(piece, str) else piece.find(b"=")
        if 0 <= padded < characters - at - 2:  # a part may end in it, the text only at its end
            raise ValueError("is padded before its end")
        part = base64.b64decode(piece, validate=True)
        data[stop : stop + len(part)] = part
        at, stop = at + len(piece), stop + len(part)
    return data[:stop].toreadonly()


def encode_base64(head: bytes, rows: memoryview) -> LongText:
    """Base64 of ``head`` and what follows it, which is bytes in C order."""
    return LongText(tuple(_encoded(head, rows)))


def _encoded(head: bytes, rows: memoryview) -> Iterator[bytes]:
    first = SLICE_BYTES - len(head)
    assert first >= 0, "a head is small"
    yield base64.b64encode(head + rows[:first])
    for at in range(first, len(rows), SLICE_BYTES):
        yield base64.b64encode(rows[at : at + SLICE_BYTES])
