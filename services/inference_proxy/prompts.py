"""Prompts counted and checked as the text they came in; values are read where somebody looks. Pure.

A prompt of 30 k tokens is 170 kB of JSON. Who only forwards it needs its length, and to know that
it is a list of token ids: both can be seen from its bytes, without a Python object per token.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import orjson
from numpy.typing import NDArray

from services.inference_proxy.limits import TOKEN_ID_MAX
from services.inference_proxy.sessions import Tokens
from services.inference_proxy.slices import SLICE_BYTES

DIGITS_MAX: Final = 9  # of an id seen in text; a longer one is left to a parser
_ZERO, _COMMA, _SPACE = (np.uint8(ord(character)) for character in "0, ")

assert 10**DIGITS_MAX - 1 <= TOKEN_ID_MAX


class Prompt:
    """The token ids of a prompt. ``len`` costs nothing, ``tokens`` reads them the first time."""

    __slots__ = ("_count", "_source", "_tokens")

    def __init__(self, source: bytes | Sequence[int], count: int) -> None:
        """``source`` is JSON that ``count_of`` has counted, or a list of token ids, or a whole
        request, an object with ``token_ids``.
        """
        self._source, self._count = source, count
        self._tokens: Tokens | None = None

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> "Prompt":
        """From a checked list."""
        return cls(token_ids, len(token_ids))

    def __len__(self) -> int:
        return self._count

    def same_as(self, other: "Prompt") -> bool:
        """Whether both have the same tokens, however they were written."""
        return len(self) == len(other) and np.array_equal(self.tokens, other.tokens)

    @property
    def size_bytes(self) -> int:
        """What keeping it keeps at most, whether it is read or not."""
        array_bytes = 4 * self._count
        is_text = self._tokens is None and isinstance(self._source, bytes)
        return max(array_bytes, len(self._source)) if is_text else array_bytes

    def settle(self) -> None:
        """Keep no Python object per token: for whoever stays a while. Slow for a long one."""
        if not isinstance(self._source, bytes):
            self._read(self._source)

    def read_if_long(self) -> None:
        """Read a long one now, in the thread that we are in, and not on somebody's loop."""
        if isinstance(self._source, bytes) and len(self._source) > SLICE_BYTES:
            self._read(self._source)

    @property
    def tokens(self) -> Tokens:
        """Their values."""
        # In this order: another thread may read them, and let go of the source, in between.
        source, tokens = self._source, self._tokens
        return self._read(source) if tokens is None else tokens

    def _read(self, source: bytes | Sequence[int]) -> Tokens:
        if isinstance(source, bytes) and source[:1] != b"[":
            source = orjson.loads(source)["token_ids"]
        if isinstance(source, bytes):
            tokens = numbers_in(source[1:-1])
        else:
            tokens = np.asarray(source, np.int32)
        self._tokens = tokens
        self._source = b""
        return tokens


def numbers_in(text: bytes) -> Tokens:
    """The numbers between the commas, a part of the text at a time: no call holds others up."""
    parts: list[Tokens] = []
    start = 0
    while start < len(text):
        cut = text.find(b",", start + SLICE_BYTES)
        stop = len(text) if cut < 0 else cut
        parts.append(np.fromstring(text[start:stop], np.int64, sep=",").astype(np.int32))
        start = stop + 1
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def count_of(text: bytes) -> int | None:
    """How many ids a JSON list of token ids has; None for any other text, and for an empty list.

    Numbers of up to DIGITS_MAX digits, between two of them a comma, or a comma and one space: what
    is written otherwise may be right too, but is not seen here.
    """
    if text[:1] != b"[" or text[-1:] != b"]":
        return None
    bytes_N = np.frombuffer(text, np.uint8)[1:-1]
    is_digit_N = (bytes_N - _ZERO) < 10  # what is less than "0" wraps around
    is_comma_N, is_space_N = bytes_N == _COMMA, bytes_N == _SPACE
    digits, commas, spaces = map(np.count_nonzero, (is_digit_N, is_comma_N, is_space_N))
    if digits + commas + spaces != len(bytes_N) or not digits:
        return None
    if not (is_digit_N[0] and is_digit_N[-1]) or _meet(is_comma_N, is_comma_N):
        return None
    if spaces and (_meet(~is_comma_N, is_space_N) or _meet(is_space_N, ~is_digit_N)):
        return None
    is_between_N = is_comma_N | is_space_N
    is_zero_N = bytes_N == _ZERO  # the first digit of several is none
    begins_with_zero = bool((is_between_N[:-2] & is_zero_N[1:-1] & is_digit_N[2:]).any())
    if begins_with_zero or (len(bytes_N) > 1 and is_zero_N[0] and is_digit_N[1]):
        return None
    return None if _has_long_run(is_between_N) else int(commas) + 1


def _meet(is_first_N: NDArray[np.bool_], is_second_N: NDArray[np.bool_]) -> bool:
    """Whether a byte of the first kind stands before one of the second."""
    return bool((is_first_N[:-1] & is_second_N[1:]).any())


def _has_long_run(is_between_N: NDArray[np.bool_]) -> bool:
    """Whether more than DIGITS_MAX bytes in a row are of one number."""
    window = DIGITS_MAX + 1
    if len(is_between_N) < window:
        return False
    seen, width = is_between_N, 1  # seen[i]: one is among the ``width`` bytes from i on
    while width < window:
        step = min(width, window - width)
        seen, width = seen[:-step] | seen[step:], width + step
    return not bool(seen.all())
