"""A kept turn as MessagePack, in parts: no call encodes all of its rows or kept sets. Pure.

The parts, joined, are what msgspec makes of a ``TurnWire``.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from services.inference_proxy.long_json import Parts
from services.kit.turns import TurnWire
from sideband.engines.long_text import LongText

VALUES_TOGETHER: Final = 1 << 16  # in lists, encoded in one call of a millisecond or two
_STR_32: Final = b"\xdb"
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(TurnWire)


def packed_turn(turn: TurnWire, rows: str | LongText | None) -> Parts:
    """The turn, with ``rows`` for its ``routed_experts``."""
    members = {name: getattr(turn, name) for name in turn.__struct_fields__}
    members["routed_experts"] = rows
    parts: list[bytes] = []
    around = [_head(0x80, 0xDE, len(members))]
    for name, value in members.items():
        around.append(_ENCODER.encode(name))
        if isinstance(value, LongText):
            parts += [b"".join(around), _STR_32 + len(value).to_bytes(4, "big"), *value.parts]
            around = []
        elif _is_long(value):
            parts += [b"".join(around), *_list_parts(value)]
            around = []
        else:
            around.append(_ENCODER.encode(value))
    return (*parts, b"".join(around))


def unpacked_turn(parts: Parts) -> tuple[TurnWire, LongText | None]:
    """The turn, and its rows if they are in parts: the turn then has an empty text for them."""
    head = next((n for n, part in enumerate(parts) if part[:1] == _STR_32 and len(part) == 5), None)
    if head is None:
        return _DECODER.decode(b"".join(parts)), None
    stop, left = head + 1, int.from_bytes(parts[head][1:], "big")
    while left > 0:
        left -= len(parts[stop])
        stop += 1
    others = (*parts[:head], _ENCODER.encode(""), *parts[stop:])
    return _DECODER.decode(b"".join(others)), LongText(parts[head + 1 : stop])


def _is_long(value: Any) -> bool:
    """Whether it is a list of lists with very many values."""
    is_nested = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    return is_nested and sum(map(len, value)) > VALUES_TOGETHER


def _list_parts(rows: list[list[Any]]) -> Iterator[bytes]:
    yield _head(0x90, 0xDC, len(rows))
    together: list[list[Any]] = []
    values = 0
    for row in rows:
        together.append(row)
        values += len(row) + 1
        if values > VALUES_TOGETHER:
            yield _items(together)
            together, values = [], 0
    if together:
        yield _items(together)


def _items(rows: list[list[Any]]) -> bytes:
    return _ENCODER.encode(rows)[len(_head(0x90, 0xDC, len(rows))) :]


def _head(short: int, long: int, count: int) -> bytes:
    """The head of an array or a map, as short as it can be."""
    if count < 16:
        return bytes([short | count])
    if count < 1 << 16:
        return bytes([long]) + count.to_bytes(2, "big")
    return bytes([long + 1]) + count.to_bytes(4, "big")
