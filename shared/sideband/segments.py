"""Segments: consecutive rows of one field of one sequence, and the pure operations on them.

Two forms carry the same rows. A ``PayloadSegment`` names rows in a payload file; an
``InlineSegment`` holds them in memory. Every operation here works on both, so that inline and by
handle cannot drift apart. Rows are addressed by absolute sequence position; positions decide,
never lengths or order of arrival. A missing row is absent, never zero.

All functions take segments of ONE field of ONE sequence unless they say otherwise; ``by_field``
splits a mixed list.

Errors: MalformedSegment (InvalidInput).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Literal, Protocol, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from sideband.errors import InvalidInput
from sideband.fields import FIELDS, INPUT_FIELDS, SAMPLED_FIELDS
from sideband.fields import Field as Field
from sideband.masks.rows import MaskRows, RaggedRows, ScoreRows
from sideband.model import RowDtype
from sideband.ranges import Ranges

Form = Literal["inline", "handle"]

POSITION_MAX: Final = 1 << 31  # positions travel as int32
OFFSET_MAX: Final = 1 << 48  # no payload file is larger than 256 TiB
# v<k>/<run id>/<two hex>/<name>.sbp; ids admit no slash, so no component can climb
FILE_PATTERN: Final = r"v\d{1,9}/[A-Za-z0-9._:-]{1,128}/[0-9a-f]{2}/[A-Za-z0-9._:-]{1,200}\.sbp"
_FILE = re.compile(FILE_PATTERN)


class MalformedSegment(InvalidInput):
    """A segment that cannot exist: a negative range, an unknown dtype, a path out of the root."""

    def __init__(self, part: str, value: object, rule: str) -> None:
        super().__init__(f"segment.{part}", value, rule)


class Segment(Protocol):
    """What clip, shift, fill and merge need to know: rows at positions [pos, stop)."""

    @property
    def field(self) -> Field: ...
    @property
    def pos(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def stop(self) -> int: ...
    def narrowed(self, first: int, last: int) -> Self:
        """Rows at positions [first, last), which must lie inside and not be empty."""

    def moved(self, by: int) -> Self:
        """The same rows at positions [pos + by, stop + by)."""

    def joined(self, other: Self) -> Self | None:
        """One segment for both when ``other`` continues this one in place; else None."""


S = TypeVar("S", bound=Segment)


class PayloadSegment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Consecutive rows of one field in one payload file.

    Row i belongs to sequence position ``pos + i`` and is row ``row + i`` of the section at byte
    ``offset`` of ``file`` (relative to the payload root: mounts differ between nodes). ``shape``
    is one row's: (layers, top-k) for routing, (vocab_size,) for a kept set, whose ``dtype`` is
    that of the decoded ids (``sideband.fields``).
    """

    field: Field
    file: str
    offset: int
    row: int
    pos: int
    rows: int
    dtype: RowDtype
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """First position after the segment: it covers [pos, stop)."""
        return self.pos + self.rows

    def check(self) -> "PayloadSegment":
        """Self, after every rule that needs no file was checked. Raises MalformedSegment."""
        # fullmatch with re.ASCII semantics of the class: "\\d" must not admit other scripts.
        if not self.file.isascii() or not _FILE.fullmatch(self.file):
            raise MalformedSegment("file", self.file, "must be v<k>/<run id>/<hh>/<name>.sbp")
        if {"..", "."} & set(self.file.split("/")):
            raise MalformedSegment("file", self.file, "must not climb out of the payload root")
        if not 0 <= self.offset <= OFFSET_MAX:
            raise MalformedSegment("offset", self.offset, f"must lie in [0, {OFFSET_MAX}]")
        if not 0 <= self.pos < POSITION_MAX:
            raise MalformedSegment("pos", self.pos, f"must lie in [0, {POSITION_MAX})")
        if self.rows < 1 or self.stop > POSITION_MAX:
            raise MalformedSegment(
                "rows", self.rows, f"must be at least 1 and end by {POSITION_MAX}"
            )
        if not 0 <= self.row <= POSITION_MAX - self.rows:
            raise MalformedSegment("row", self.row, "must not be negative nor overflow")
        self._check_shape()
        return self

    def _check_shape(self) -> None:
        field = FIELDS[self.field]
        if self.dtype not in field.dtypes:
            rule = f"{field.elements} are {' or '.join(field.dtypes)}"
            raise MalformedSegment("dtype", self.dtype, rule)
        limits = [limit for _, limit in field.widths]
        if len(self.shape) != len(limits) or not all(
            1 <= width <= limit for width, limit in zip(self.shape, limits, strict=True)
        ):
            names = ", ".join(name for name, _ in field.widths)
            raise MalformedSegment("shape", self.shape, f"must be ({names})")

    def narrowed(self, first: int, last: int) -> "PayloadSegment":
        """Rows at positions [first, last); addressed, never read, so every encoding clips alike."""
        assert self.pos <= first < last <= self.stop
        return msgspec.structs.replace(
            self, row=self.row + first - self.pos, pos=first, rows=last - first
        )

    def moved(self, by: int) -> "PayloadSegment":
        """The same rows, ``by`` positions later."""
        return msgspec.structs.replace(self, pos=self.pos + by)

    def joined(self, other: "PayloadSegment") -> "PayloadSegment | None":
        """Both as one when ``other`` continues this one in file and position."""
        continues = (
            (self.file, self.offset, self.field) == (other.file, other.offset, other.field)
            and (self.dtype, self.shape) == (other.dtype, other.shape)
            and self.stop == other.pos
            and self.row + self.rows == other.row
        )
        return msgspec.structs.replace(self, rows=self.rows + other.rows) if continues else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InlineSegment:
    """The same rows in memory: an array [rows, layers, top-k] for routing, else RaggedRows."""

    field: Field
    pos: int
    data: NDArray[np.uint8] | NDArray[np.uint16] | MaskRows | ScoreRows

    @property
    def rows(self) -> int:
        """Number of rows held."""
        return len(self.data)

    @property
    def stop(self) -> int:
        """First position after the segment: it covers [pos, stop)."""
        return self.pos + self.rows

    def narrowed(self, first: int, last: int) -> "InlineSegment":
        """Rows at positions [first, last); shares memory."""
        assert self.pos <= first < last <= self.stop
        a, b = first - self.pos, last - self.pos
        data = self.data.slice(a, b) if isinstance(self.data, RaggedRows) else self.data[a:b]
        return replace(self, pos=first, data=data)

    def moved(self, by: int) -> "InlineSegment":
        """The same rows, ``by`` positions later."""
        return replace(self, pos=self.pos + by)

    def joined(self, other: "InlineSegment") -> "InlineSegment | None":
        """Never: joining would copy arrays."""
        return None


AnySegment = PayloadSegment | InlineSegment


def by_field(segments: Iterable[S], field: Field) -> list[S]:
    """The segments of one field, in the order given."""
    return [segment for segment in segments if segment.field == field]


def clip(segment: S, *, start: int, stop: int) -> S | None:
    """The rows of ``segment`` at positions in [start, stop), or None when there are none.

    The same object comes back when nothing is cut.
    """
    assert start <= stop, "an inverted range is the caller's bug"
    first, last = max(start, segment.pos), min(stop, segment.stop)
    if first >= last:
        return None
    if (first, last) == (segment.pos, segment.stop):
        return segment
    return segment.narrowed(first, last)


def cut(segments: Iterable[S], *, start: int, stop: int) -> list[S]:
    """All rows at positions in [start, stop); several fields at once are fine."""
    clipped = (clip(segment, start=start, stop=stop) for segment in segments)
    return [segment for segment in clipped if segment is not None]


def shift(segments: Iterable[S], by: int) -> list[S]:
    """All segments moved by ``by`` positions; several fields at once are fine."""
    return [segment.moved(by) for segment in segments]


def coverage(segments: Iterable[S]) -> list[tuple[int, int]]:
    """The positions covered, as ascending disjoint half-open ranges; neighbours are joined."""
    return _covered(segments).to_list()


def holes(segments: Iterable[S], *, start: int, stop: int) -> list[tuple[int, int]]:
    """The parts of [start, stop) that no segment covers, ascending."""
    return _covered(segments).missing(start, stop)


def _covered(segments: Iterable[S]) -> Ranges:
    covered = Ranges()
    for segment in segments:
        covered.add(segment.pos, segment.stop)
    return covered


def fill(base: Iterable[S], extra: Iterable[S]) -> list[S]:
    """``base`` plus the rows of ``extra`` at positions that nothing before them covers.

    The first row of a position wins, in the order given: ``base`` before ``extra``, and within
    each. The result is disjoint and ascends by position. n segments cost n log n: a rollout may
    have hundreds of turns.
    """
    covered = Ranges()
    kept: list[S] = []
    for segment in chain(base, extra):
        gaps = covered.missing(segment.pos, segment.stop)
        kept.extend(
            segment if gap == (segment.pos, segment.stop) else segment.narrowed(*gap)
            for gap in gaps
        )
        covered.add(segment.pos, segment.stop)
    return join(sorted(kept, key=lambda segment: segment.pos))


def join(segments: Sequence[S]) -> list[S]:
    """Neighbours that continue each other as one segment each. ``segments`` ascend by position."""
    joined: list[S] = []
    for segment in segments:
        one = joined[-1].joined(segment) if joined else None
        if one is None:
            joined.append(segment)
        else:
            joined[-1] = one
    return joined


def concatenate(turns: Iterable[Sequence[S]]) -> list[S]:
    """The segments of one branch from those of its turns, all in the branch's positions.

    The turn that first ran a token keeps its row (weights may have changed since); later rows fill
    only gaps, so the row of a turn's last token comes from the next turn.
    """
    return fill((), chain.from_iterable(turns))


def merge_prefill_decode(
    prefill: Sequence[S], decode: Sequence[S], *, prompt_tokens: int
) -> list[S]:
    """One turn's segments (all fields at once) from the two legs of a P/D pair.

    Rows about inputs: prefill's, then decode's from max(``prompt_tokens``, the end of prefill's):
    what decode says below is garbage unless it was re-prefilled, and is never used, also where
    prefill has none. Prefill is asked for one token, so its rows end at ``prompt_tokens``; a
    dialect whose prefill ran further is one whose decode goes on from there. Rows about what was
    sampled: decode's only, since decode samples the first token itself.
    """
    merged: list[S] = []
    for field in INPUT_FIELDS:
        head = by_field(prefill, field)
        first = max((segment.stop for segment in head), default=0)
        first = max(first, prompt_tokens)
        tail = cut(by_field(decode, field), start=first, stop=POSITION_MAX)
        merged += concatenate([head, tail])
    for field in SAMPLED_FIELDS:
        own = cut(by_field(decode, field), start=prompt_tokens, stop=POSITION_MAX)
        merged += concatenate([own])
    return merged
