"""MessagePack of structs that hold large arrays, in pieces: no call copies all of it. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

JOINED_BYTES_MAX: Final = 256 << 10  # of an array that is encoded with what is around it


def packed_pieces(
    value: object, apart: tuple[type[msgspec.Struct], ...]
) -> Iterator[bytes | memoryview]:
    """What, joined, msgspec makes of ``value``; large arrays are given as they lie in memory.

    ``apart`` are the kinds that may hold some, themselves or in lists. They are array-like.
    """
    if isinstance(value, memoryview) and value.nbytes > JOINED_BYTES_MAX:
        yield b"\xc6" + value.nbytes.to_bytes(4, "big")  # bin 32
        yield value
    elif isinstance(value, apart):
        fields = [getattr(value, name) for name in value.__struct_fields__]
        tag = value.__struct_config__.tag
        yield from _items(fields if tag is None else [tag, *fields], apart)
    elif isinstance(value, list) and value and isinstance(value[0], apart):
        yield from _items(value, apart)
    else:
        yield msgspec.msgpack.encode(value)


def _items(
    values: Sequence[Any], apart: tuple[type[msgspec.Struct], ...]
) -> Iterator[bytes | memoryview]:
    """An array: its head is what comes before the items of one of so many nulls."""
    count = len(values)
    yield msgspec.msgpack.encode([None] * count)[:-count]
    for value in values:
        yield from packed_pieces(value, apart)
