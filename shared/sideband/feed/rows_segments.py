"""Segments of a micro batch or chunk on the wire, both forms, and every rule that they obey.

A file name and a kind of row (field, dtype, shape) travel once per row of the grid; a segment by
handle then costs 26 bytes.
"""

from collections.abc import Sequence
from math import prod

import msgspec
import numpy as np
from numpy.typing import NDArray

from sideband.errors import InvalidInput
from sideband.feed.columns import U8, U32, from_bytes, to_bytes, uint32
from sideband.feed.errors import MalformedStep
from sideband.feed.limits import ROW_TOKENS_MAX
from sideband.fields import FIELDS, Field
from sideband.masks.rows import MaskRows, RaggedRows, ScoreRows
from sideband.masks.rules import problem_of
from sideband.model import ModelShape, RowDtype
from sideband.segments import AnySegment, InlineSegment, PayloadSegment

HANDLE = np.dtype(
    [
        ("file", "<u4"),
        ("kind", "<u2"),
        ("offset", "<u8"),
        ("row", "<u4"),
        ("pos", "<u4"),
        ("rows", "<u4"),
    ]
)
assert HANDLE.itemsize == 26, "docs/feed-protocol.md promises 26 bytes"


class KindWire(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What one row of a segment is."""

    field: Field
    dtype: RowDtype
    shape: tuple[int, ...]


class HandlesWire(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Segments by handle: string and kind tables, then ``HANDLE`` entries."""

    files: list[str]
    kinds: list[KindWire]
    table: memoryview


class InlineWire(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One inline segment: routing rows in ``data``; of ragged rows the counts in ``data`` and the
    values in ``ids``."""

    field: Field
    pos: int
    dtype: RowDtype
    shape: tuple[int, ...]
    data: memoryview
    ids: memoryview


def encode_handles(segments: Sequence[PayloadSegment]) -> HandlesWire:
    """Segments by handle as one table."""
    files: dict[str, int] = {}
    kinds: dict[tuple[Field, RowDtype, tuple[int, ...]], int] = {}
    entries = [
        (
            files.setdefault(segment.file, len(files)),
            kinds.setdefault((segment.field, segment.dtype, segment.shape), len(kinds)),
            segment.offset,
            segment.row,
            segment.pos,
            segment.rows,
        )
        for segment in segments
    ]
    table = np.array(entries, HANDLE)
    kinds_wire = [KindWire(*kind) for kind in kinds]
    return HandlesWire(list(files), kinds_wire, to_bytes(table.view(np.uint8), U8))


def decode_handles(element: str, wire: HandlesWire) -> tuple[PayloadSegment, ...]:
    """The segments, each checked on its own. Raises MalformedStep."""
    table = from_bytes(f"{element}.table", wire.table, HANDLE)
    if len(table) and int(table["file"].max()) >= len(wire.files):
        raise MalformedStep(f"{element}.table", "must name an entry of files")
    if len(table) and int(table["kind"].max()) >= len(wire.kinds):
        raise MalformedStep(f"{element}.table", "must name an entry of kinds")
    segments = []
    for index, (file, kind_index, offset, row, pos, rows) in enumerate(table.tolist()):
        kind = wire.kinds[kind_index]
        segment = PayloadSegment(
            field=kind.field,
            file=wire.files[file],
            offset=offset,
            row=row,
            pos=pos,
            rows=rows,
            dtype=kind.dtype,
            shape=kind.shape,
        )
        try:
            segments.append(segment.check())
        except InvalidInput as exc:
            raise MalformedStep(f"{element}.table[{index}]", str(exc)) from exc
    return tuple(segments)


def encode_inline(segment: InlineSegment, model: ModelShape) -> InlineWire:
    """One inline segment; its arrays are not copied before they are written out."""
    data = segment.data
    if isinstance(data, RaggedRows):
        kind = FIELDS[segment.field].kind(model)
        counts = to_bytes(np.diff(data.starts_N), U32)
        values = to_bytes(data.values_M, data.dtype.newbyteorder("<"))
        return InlineWire(segment.field, segment.pos, *kind, counts, values)
    dtype: RowDtype = "uint8" if data.dtype == np.uint8 else "uint16"
    body = to_bytes(data, data.dtype.newbyteorder("<"))
    return InlineWire(segment.field, segment.pos, dtype, data.shape[1:], body, memoryview(b""))


def decode_inline(element: str, wire: InlineWire, model: ModelShape) -> InlineSegment:
    """One inline segment with every id in range. Raises MalformedStep."""
    if not 0 <= wire.pos < ROW_TOKENS_MAX:
        raise MalformedStep(f"{element}.pos", f"must lie in [0, {ROW_TOKENS_MAX})")
    check_kind(element, KindWire(wire.field, wire.dtype, wire.shape), model)
    ragged = FIELDS[wire.field].ragged
    if ragged is not None:
        rows = _decode_ragged(element, wire, ragged, vocab_size=model.vocab_size)
        return InlineSegment(field=wire.field, pos=wire.pos, data=rows)
    return InlineSegment(field=wire.field, pos=wire.pos, data=_decode_rows(element, wire, model))


def _decode_ragged(
    element: str,
    wire: InlineWire,
    ragged: type[MaskRows] | type[ScoreRows],
    *,
    vocab_size: int,
) -> MaskRows | ScoreRows:
    counts = uint32(f"{element}.data", wire.data)
    if len(counts) == 0:
        raise MalformedStep(f"{element}.data", "a segment holds at least one row")
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    little = ragged.dtype.newbyteorder("<")
    values = from_bytes(f"{element}.ids", wire.ids, little, count=int(starts[-1]))
    rows = ragged(starts, values.view(ragged.dtype))
    problem = problem_of(rows, vocab_size=vocab_size)
    if problem is not None:
        raise MalformedStep(f"{element}.ids", problem)
    return rows


def _decode_rows(
    element: str, wire: InlineWire, model: ModelShape
) -> NDArray[np.uint8] | NDArray[np.uint16]:
    if wire.ids.nbytes:
        raise MalformedStep(f"{element}.ids", "must be empty for routing rows")
    row_bytes = model.row_dtype.itemsize * prod(wire.shape)
    if wire.data.nbytes == 0 or wire.data.nbytes % row_bytes:
        raise MalformedStep(f"{element}.data", f"must hold one or more rows of {row_bytes} bytes")
    little = model.row_dtype.newbyteorder("<")
    rows = from_bytes(f"{element}.data", wire.data, little).reshape(-1, *wire.shape)
    if int(rows.max()) >= model.id_space:
        raise MalformedStep(f"{element}.data", f"expert ids must lie in [0, {model.id_space})")
    return rows.view(np.uint8) if model.row_dtype == np.uint8 else rows.view(np.uint16)


def check_kind(element: str, kind: KindWire, model: ModelShape) -> None:
    """A kind of row must be the model's own. Raises MalformedStep."""
    expected = KindWire(kind.field, *FIELDS[kind.field].kind(model))
    if kind != expected:
        rule = f"{kind.field} rows are {kind.dtype} {list(kind.shape)}, the model has "
        raise MalformedStep(element, rule + f"{expected.dtype} {list(expected.shape)}")


def check_places(
    element: str,
    segments: Sequence[AnySegment],
    field: Field,
    ranges: Sequence[tuple[int, int]],
) -> None:
    """Segments of one field must be disjoint, each inside one of the ascending ``ranges``.

    Raises MalformedStep.
    """
    own = sorted((s.pos, s.stop) for s in segments if s.field == field)
    if not own:
        return
    pos, stop = np.array(own, np.int64).T
    if (pos[1:] < stop[:-1]).any():
        raise MalformedStep(element, f"{field} segments overlap")
    starts, stops = np.array(ranges, np.int64).reshape(-1, 2).T
    index = np.searchsorted(starts, pos, side="right") - 1
    if (index < 0).any() or (stop > stops[index]).any():
        raise MalformedStep(element, f"{field} segments must lie inside one sequence or piece")
