"""What was right once: bytes cut, stretched, spliced, overwritten; MessagePack of other values."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from hypothesis import strategies as st

NUMBERS: Final = st.one_of(
    st.integers(-2, 70),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.sampled_from([127, 255, 1 << 16, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 48]),
)
_WORDS: Final = st.sampled_from(
    [b"\0" * 8, b"\xff" * 8, b"\x80\0\0\0", b"\1\0\0\0", b"\0\0\xc0\x7f"]
)
_VALUES: Final = st.recursive(
    st.one_of(
        NUMBERS, st.none(), st.booleans(), st.floats(), st.text(max_size=8), st.binary(max_size=40)
    ),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
Path = tuple[int | str, ...]


def changed(data: st.DataObject, original: bytes, others: Sequence[bytes]) -> bytes:
    """``original`` after up to three changes; splices come from ``others``."""
    found = original
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, len(found)))
        length = data.draw(st.one_of(st.integers(0, 16), st.integers(0, len(found) - start)))
        found = (
            found[:start] + _middle(data, found, start, length, others) + found[start + length :]
        )
    return found


def overwritten(data: st.DataObject, original: bytes) -> bytes:
    """``original`` with up to three runs of its bytes changed and its size kept."""
    found = bytearray(original)
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, len(found) - 1))
        if data.draw(st.booleans()):  # small numbers are drawn more often, and both ends matter
            start = len(found) - 1 - start
        new = data.draw(_WORDS | st.binary(min_size=1, max_size=8))[: len(found) - start]
        found[start : start + len(new)] = new
    return bytes(found)


def _middle(
    data: st.DataObject, found: bytes, start: int, length: int, others: Sequence[bytes]
) -> bytes:
    """What stands there instead: other bytes, a part of another original, itself twice, nothing."""
    kind = data.draw(st.sampled_from(["bytes", "splice", "twice", "nothing"]))
    if kind == "bytes":
        return data.draw(_WORDS | st.binary(max_size=40))
    if kind == "twice":
        return found[start : start + length] * 2
    if kind == "nothing":
        return b""
    other = data.draw(st.sampled_from(others))
    begin = data.draw(st.integers(0, len(other)))
    return other[begin : begin + data.draw(st.integers(0, 64))]


def revalued(data: st.DataObject, original: bytes) -> bytes:
    """The MessagePack ``original`` with up to three of its values replaced, dropped or doubled."""
    tree = msgspec.msgpack.decode(original)
    for _ in range(data.draw(st.integers(0, 3))):
        paths = list(_paths(tree))
        if not paths:
            break
        _change(data, tree, data.draw(st.sampled_from(paths)))
    return msgspec.msgpack.encode(tree)


def _paths(tree: Any, path: Path = ()) -> list[Path]:
    """Where a value stands in the lists and maps of ``tree``."""
    if isinstance(tree, list):
        steps: list[tuple[int | str, Any]] = list(enumerate(tree))
    elif isinstance(tree, dict):
        steps = list(tree.items())
    else:
        return []
    return [found for key, value in steps for found in [(*path, key), *_paths(value, (*path, key))]]


def _change(data: st.DataObject, tree: Any, path: Path) -> None:
    place = tree
    for key in path[:-1]:
        place = place[key]
    key, value = path[-1], place[path[-1]]
    how = data.draw(st.sampled_from(["replace", "edit", "drop", "double"]))
    if how == "edit" and isinstance(value, bytes) and value:
        place[key] = overwritten(data, value)
    elif how == "edit" and type(value) is int:
        place[key] = data.draw(NUMBERS)
    elif how == "drop":
        del place[key]
    elif how == "double" and isinstance(value, bytes | str | list):
        place[key] = value * 2
    else:
        place[key] = data.draw(_VALUES)
