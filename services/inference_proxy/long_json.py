"""JSON with long strings, as the parts in which it came: no call handles all of it. Pure.

What lies within a long string (base64 of rows, most of any large answer) is cut out before the rest
is joined and parsed, with a mark in its place, and put in again by whoever writes the JSON. The
string is a ``LongText`` meanwhile, a ``str`` where JSON needs an escape for it. What is not plainly
right is joined and left to the parsers.

Errors: TooMuchBeside.
"""

import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import orjson

from sideband.engines.long_text import LongText

Parts = tuple[bytes, ...]  # of one text, whole when joined

CUT_BYTES_MIN: Final = 32 << 10  # parsing a shorter piece costs less than its cut
BESIDE_BYTES_MAX: Final = 64 << 20  # what is parsed in one call, which takes 30 ms for so much
# A mark begins as no JSON does: outside of a string it is an error. Nobody outside can know it.
_MARK: Final = f"m{secrets.token_hex(16)}."
_MARKED: Final = re.compile(f"{re.escape(_MARK)}([0-9]+);")
_PLAIN: Final = re.compile(r"[ !#-\[\]-~]*")  # needs no escape
_BASE64: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
_ESCAPED_BYTES: Final = len(r"\u0041")  # what so many plain bytes follow is no escape's begin


class TooMuchBeside(ValueError):
    """The text has too much beside its long strings."""

    def __init__(self, size_bytes: int, bytes_max: int) -> None:
        self.size_bytes, self.bytes_max = size_bytes, bytes_max
        super().__init__(f"{size_bytes} bytes beside long strings, at most {bytes_max}")


def size_of(parts: Sequence[bytes]) -> int:
    """Bytes of the text."""
    return sum(map(len, parts))


def read_long(
    parts: Sequence[bytes],
    parse: Callable[[bytes], Any],
    *,
    beside_bytes_max: int | None = None,
) -> Any:
    """What ``parse`` gives for the whole text, but long strings as ``LongText``.

    ``parse`` gives None for what is no JSON. Raises TooMuchBeside (more than BESIDE_BYTES_MAX, or
    the given bound), and what ``parse`` does.
    """
    most = BESIDE_BYTES_MAX if beside_bytes_max is None else beside_bytes_max
    rest, cuts = cut(parts)
    if len(rest) > most:
        raise TooMuchBeside(len(rest), most)
    if cuts:
        filling = _Filling(cuts)
        value = filling.filled(parse(rest))
        if filling.is_right:
            return value
        if size_of(parts) > most:
            raise TooMuchBeside(size_of(parts), most)
        rest = b"".join(parts)
    return parse(rest)


def cut(parts: Sequence[bytes]) -> tuple[bytes, list[Parts]]:
    """The text with marks for what was cut out, and what that was."""
    rest: list[bytes] = []
    cuts: list[list[bytes]] = []
    is_open = False  # the last cut may go on
    for part in _together(parts):
        if is_open:
            begin = _until_quote(part)
            if _is_base64(begin):
                cuts[-1].append(begin)
                part = part[len(begin) :]
            is_open = not part
        if not part:
            continue
        end = part[part.rfind(b'"') + 1 :]
        if len(end) < CUT_BYTES_MIN or not _is_base64(end):
            rest.append(part)
            continue
        kept_bytes = len(part) - len(end) + _ESCAPED_BYTES
        rest += [part[:kept_bytes], f"{_MARK}{len(cuts)};".encode()]
        cuts.append([part[kept_bytes:]])
        is_open = True
    return b"".join(rest), [tuple(each) for each in cuts]


def write_long(value: Any) -> Parts:
    """The JSON of ``value``, in parts where it holds a ``LongText``."""
    return _written(lambda hook: msgspec.json.encode(value, enc_hook=hook))


def dump_long(value: Any) -> Parts:
    """The same as orjson writes it: of a value without raw JSON."""
    return _written(lambda hook: orjson.dumps(value, default=hook))


def _written(encode: Callable[[Callable[[object], object]], bytes]) -> Parts:
    texts: list[LongText] = []

    def mark(found: object) -> str:
        if not isinstance(found, LongText):
            raise TypeError(f"{type(found).__name__} cannot be written")
        texts.append(found)
        return f"{_MARK}{len(texts) - 1};"

    content = encode(mark)
    parts: list[bytes] = []
    start = 0
    for number, text in enumerate(texts):  # in the order in which they were written
        marked = f"{_MARK}{number};".encode()
        stop = content.index(marked, start)
        parts += [content[start:stop], *text.parts]
        start = stop + len(marked)
    return (*parts, content[start:] if start else content)


class _Filling:
    """Puts long strings in where their marks are, in place."""

    def __init__(self, cuts: Sequence[Parts]) -> None:
        self._cuts = cuts
        self._found: list[int] = []

    @property
    def is_right(self) -> bool:
        """Every cut was within one string, and is again."""
        return sorted(self._found) == list(range(len(self._cuts)))

    def filled(self, value: Any) -> Any:
        """The value, or what belongs in its place."""
        if isinstance(value, str):
            return self._text(value) if _MARK in value else value
        if isinstance(value, dict):
            for name, member in value.items():
                value[name] = self.filled(member)
        elif isinstance(value, list) and value and isinstance(value[0], (str, list, dict)):
            value[:] = map(self.filled, value)
        return value

    def _text(self, value: str) -> str | LongText:
        first, *others = _MARKED.split(value)
        numbers, between = [int(number) for number in others[::2]], others[1::2]
        self._found += numbers
        parts = [first.encode()]
        for number, text in zip(numbers, between, strict=True):
            parts += [*self._cuts[number], text.encode()]
        if not all(map(_PLAIN.fullmatch, (first, *between))):
            return b"".join(parts).decode()
        return LongText(tuple(part for part in parts if part))


def _together(parts: Sequence[bytes]) -> Iterator[bytes]:
    """The parts, small ones joined: over a network a string may come in none that could be cut."""
    small: list[bytes] = []
    size_bytes = 0
    for part in parts:
        if len(part) >= CUT_BYTES_MIN:
            if small:
                yield b"".join(small)
                small, size_bytes = [], 0
            yield part
            continue
        small.append(part)
        size_bytes += len(part)
        if size_bytes >= 2 * CUT_BYTES_MIN:
            yield b"".join(small)
            small, size_bytes = [], 0
    if small:
        yield b"".join(small)


def _until_quote(part: bytes) -> bytes:
    stop = part.find(b'"')
    return part if stop < 0 else part[:stop]


def _is_base64(part: bytes) -> bool:
    return not part.translate(None, _BASE64)
