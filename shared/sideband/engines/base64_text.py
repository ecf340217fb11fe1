"""Base64 of large arrays, decoded a part at a time: no call holds the interpreter long. Pure."""

import base64
from typing import Final

SLICE_CHARACTERS: Final = 1 << 20  # about a millisecond

assert SLICE_CHARACTERS % 4 == 0, "parts are whole groups of four characters"


def decode_base64(text: str) -> memoryview:
    """The bytes, read-only. Raises ValueError for anything else."""
    if len(text) % 4:
        raise ValueError("is not of whole groups of four characters")
    padded = text.find("=")
    if 0 <= padded < len(text) - 2:  # a part may end in it, the text only at its end
        raise ValueError("is padded before its end")
    data = bytearray(len(text) // 4 * 3)
    stop = 0
    for at in range(0, len(text), SLICE_CHARACTERS):
        part = base64.b64decode(text[at : at + SLICE_CHARACTERS], validate=True)
        data[stop : stop + len(part)] = part
        stop += len(part)
    del data[stop:]
    return memoryview(data).toreadonly()
