"""Hypothesis strategies for segments of both forms, and the plain rows they must agree with.

A ``Stretch`` says which sequence's rows lie at which positions, without saying in which form; the
same stretches become handles or arrays. A plain model is then a dictionary from position to
(serial, origin): the row that sequence ``serial`` has at position ``origin``.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hypothesis import strategies as st

from sideband.fields import FIELDS, Field
from sideband.model import ModelShape
from sideband.segments import AnySegment, Form
from sideband.testing.batches import (
    NARROW_MODEL,
    SEGMENT_MAKERS,
    WIDE_MODEL,
    Row,
    row_at,
)

FORMS: tuple[Form, ...] = ("inline", "handle")
PlainRows = dict[int, tuple[int, int]]  # position -> (serial, origin)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows of sequence ``serial`` at positions [start, stop), never empty."""

    serial: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Kind:
    """What a segment is besides its rows."""

    form: Form
    field: Field
    model: ModelShape = WIDE_MODEL


def kinds() -> st.SearchStrategy[Kind]:
    """Both forms, every field, both dtypes of routing."""
    models = st.sampled_from((WIDE_MODEL, NARROW_MODEL))
    return st.builds(Kind, st.sampled_from(FORMS), st.sampled_from(tuple(FIELDS)), models)


@st.composite
def stretches(draw: st.DrawFn, *, positions_max: int = 40, serials_max: int = 3) -> Stretch:
    """One stretch within [0, ``positions_max``)."""
    start = draw(st.integers(0, positions_max - 1))
    stop = draw(st.integers(start + 1, positions_max))
    return Stretch(draw(st.integers(0, serials_max)), start, stop)


def stretch_lists(*, size_max: int = 6) -> st.SearchStrategy[list[Stretch]]:
    """Stretches in any order, which may overlap and repeat."""
    return st.lists(stretches(), max_size=size_max)


@st.composite
def disjoint_stretches(draw: st.DrawFn, *, positions_max: int = 40) -> list[Stretch]:
    """Ascending stretches of one sequence; some touch, some leave gaps."""
    bounds = sorted(draw(st.sets(st.integers(0, positions_max), max_size=8)))
    serial = draw(st.integers(0, 3))
    pairs = itertools.pairwise(bounds)
    return [Stretch(serial, *pair) for pair in pairs if draw(st.booleans())]


def segment_of(stretch: Stretch, kind: Kind) -> AnySegment:
    """The stretch as one segment."""
    make = SEGMENT_MAKERS[kind.field]
    return make(stretch.serial, stretch.start, stretch.stop, form=kind.form, model=kind.model)


def segments_of(stretches: Iterable[Stretch], kind: Kind) -> list[AnySegment]:
    """Each stretch as one segment, in order."""
    return [segment_of(stretch, kind) for stretch in stretches]


def plain(stretches: Iterable[Stretch]) -> PlainRows:
    """The plain model of stretches: the first row of a position wins."""
    rows: PlainRows = {}
    for stretch in stretches:
        for position in range(stretch.start, stretch.stop):
            rows.setdefault(position, (stretch.serial, position))
    return rows


def rows_of(rows: Mapping[int, tuple[int, int]], kind: Kind) -> dict[int, Row]:
    """A plain model's rows as ``sideband.testing.batches.rows_by_position`` shows them."""
    return {
        position: row_at(segment_of(Stretch(serial, origin, origin + 1), kind), 0)
        for position, (serial, origin) in rows.items()
    }
