"""Long JSON lists read a part at a time: no call holds the interpreter's lock for long. Pure.

A list of a million numbers in one call keeps every other thread waiting, the event loop too. The
parts are cut between items and parsed by the same parser; what cannot be cut so is parsed whole.
"""

import re
from typing import Any, Final

import msgspec
import orjson

SLICE_BYTES: Final = 256 << 10  # some milliseconds of parsing
_OF_NUMBERS: Final = b"0123456789.,[]-+eEnul"
# A number below both bounds is far from the largest float, 1.8e308, beyond which none is parsed.
NUMBER_BYTES_MAX: Final = 200
_LARGE_EXPONENT: Final = re.compile(rb"[eE]\+?[0-9]{3}")


def parsed_list(text: bytes) -> Any:
    """The same as ``orjson.loads(text)``, which a long list of numbers does not hold up.

    Raises orjson.JSONDecodeError.
    """
    is_list = text[:1] == b"[" and text[-1:] == b"]"
    if len(text) <= SLICE_BYTES or not is_list or b'"' in text or b"{" in text:
        return orjson.loads(text)
    between = b"],[" if text[:2] == b"[[" else b","
    if between == b"," and text.count(b"[") != 1:
        return orjson.loads(text)
    items: list[Any] = []
    start, keeps = 1, len(between) // 2  # of the separator, what closes an item and opens one
    try:
        while (cut := text.find(between, start + SLICE_BYTES)) >= 0:
            items += _items(text[start : cut + keeps])
            start = cut + keeps + 1
        return items + (_items(text[start:-1]) if items else orjson.loads(text))
    except orjson.JSONDecodeError:  # it is nested otherwise, or wrong: the whole says where
        return orjson.loads(text)


def _items(text: bytes) -> list[Any]:
    """The items of a part: one at least, as between two of them there must be one."""
    items: list[Any] = orjson.loads(b"[" + text + b"]")
    if not items:
        raise orjson.JSONDecodeError("an item is missing", "", 0)
    return items


def is_list_of_lists(text: memoryview) -> bool:
    """Whether JSON is surely a list of lists of numbers, written without a space.

    Its numbers must be such that ``opened`` can read them: who looks at them looks late.
    """
    if bytes(text[:2]) != b"[[":
        return False
    begins = ends = rows = 0
    for at in range(0, len(text), SLICE_BYTES):
        part = bytes(text[at : at + SLICE_BYTES + NUMBER_BYTES_MAX])  # what begins in it ends in it
        if part.translate(None, _OF_NUMBERS) or part.find(b"[[", 0 if at else 1) >= 0:
            return False  # no list begins a row, and the counts say that none follows a number
        if _has_large_number(part):
            return False
        begins += part.count(b",[", 0, SLICE_BYTES + 1)
        ends += part.count(b"],", 0, SLICE_BYTES + 1)
        rows += part.count(b"],[", 0, SLICE_BYTES + 2)
    return begins == ends == rows


def _has_large_number(part: bytes) -> bool:
    """Whether a number may be too large for a float; that it is long is enough."""
    if (b"e" in part or b"E" in part) and _LARGE_EXPONENT.search(part):
        return True
    start = 0
    while len(part) - start > NUMBER_BYTES_MAX:
        comma = part.rfind(b",", start, start + NUMBER_BYTES_MAX)
        if comma < 0:
            return True
        start = comma + 1
    return False


def opened(rows: Any) -> Any:
    """Rows that may be raw JSON, as objects."""
    return parsed_list(bytes(rows)) if isinstance(rows, msgspec.Raw) else rows
