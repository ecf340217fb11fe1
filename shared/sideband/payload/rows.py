"""Read the rows of one segment: whole blocks, verified, then cut to the rows that were asked for.

Legend: N rows of the segment, B blocks of the section.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sideband.errors import InvalidInput
from sideband.masks.rows import MaskRows
from sideband.payload.columns import RowArray
from sideband.payload.encodings import MASK_ENCODINGS, ROUTING_ENCODINGS, RoutingEncoding
from sideband.payload.errors import (
    BlockMalformed,
    ChecksumMismatch,
    SegmentBeyondSection,
    SegmentMismatch,
    UnsupportedEncoding,
)
from sideband.payload.handles import OpenPayload, OpenSection
from sideband.payload.io import read_exactly
from sideband.payload.layout import Buffer, checksum
from sideband.segments import Field, PayloadSegment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    """One block that a segment needs: the rows [first, last) of it, which go to [start, stop)."""

    index: int
    first: int
    last: int
    rows: int
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.last - self.first == self.rows


def read_routing_rows(payload: OpenPayload, segment: PayloadSegment, out: RowArray) -> None:
    """Fill ``out`` [N, layers, top-k]; whole raw blocks are read where they shall lie."""
    opened = _section_of(payload, segment, "routed_experts")
    encoding = ROUTING_ENCODINGS.get(opened.section.encoding)
    if encoding is None:
        raise UnsupportedEncoding(payload.file, opened.section.encoding)
    blocks = list(_blocks(opened, segment))
    stored: list[memoryview] = [
        out[block.start : block.stop].data.cast("B")
        if encoding.is_raw and block.is_whole
        else memoryview(bytearray(int(opened.sizes[block.index])))
        for block in blocks
    ]
    _read_verified(payload, opened, blocks, stored)
    for block, view in zip(blocks, stored, strict=True):
        if encoding.is_raw and block.is_whole:
            continue
        _decode_into(payload, block, view, encoding, out)


def _decode_into(
    payload: OpenPayload,
    block: _Block,
    stored: memoryview,
    encoding: RoutingEncoding,
    out: RowArray,
) -> None:
    if encoding.is_raw:  # an edge: only the wanted rows are copied
        row_bytes = len(stored) // block.rows
        wanted = stored[block.first * row_bytes : block.last * row_bytes]
        out[block.start : block.stop].data.cast("B")[:] = wanted
        return
    rows = np.empty((block.rows, *out.shape[1:]), out.dtype)
    try:
        encoding.decode_block(stored, rows)
    except ValueError as exc:
        raise BlockMalformed(payload.file, block=block.index, reason=str(exc)) from exc
    out[block.start : block.stop] = rows[block.first : block.last]


def read_mask_rows(payload: OpenPayload, segment: PayloadSegment) -> MaskRows:
    """The kept sets of the segment, N rows."""
    opened = _section_of(payload, segment, "sampling_mask")
    encoding = MASK_ENCODINGS.get(opened.section.encoding)
    if encoding is None:
        raise UnsupportedEncoding(payload.file, opened.section.encoding)
    blocks = list(_blocks(opened, segment))
    stored = [memoryview(bytearray(int(opened.sizes[block.index]))) for block in blocks]
    _read_verified(payload, opened, blocks, stored)
    parts = []
    for block, view in zip(blocks, stored, strict=True):
        try:
            rows = encoding.decode_block(view, block.rows, segment.shape[0])
        except InvalidInput as exc:
            raise BlockMalformed(payload.file, block=block.index, reason=str(exc)) from exc
        parts.append(rows if block.is_whole else rows.slice(block.first, block.last))
    return parts[0] if len(parts) == 1 else MaskRows.concatenate(parts)


def _section_of(payload: OpenPayload, segment: PayloadSegment, field: Field) -> OpenSection:
    """The section that the segment names, after it was held against all that the file says."""
    file = payload.file
    opened = payload.sections.get(segment.offset)
    if opened is None:
        offsets = sorted(payload.sections)
        raise SegmentMismatch(file, part="offset", found=segment.offset, expected=offsets)
    section = opened.section
    for part, expected in (
        ("field", field),  # a caller may ask for masks with a segment of routing
        ("field", section.field),
        ("dtype", section.dtype),
        ("shape", section.shape),
    ):
        found = getattr(segment, part)
        if found != expected:
            raise SegmentMismatch(file, part=part, found=found, expected=expected)
    first, stop = segment.row, segment.row + segment.rows
    if stop > section.rows:
        raise SegmentBeyondSection(file, row=first, rows=segment.rows, section_rows=section.rows)
    if not any(row <= first < stop <= row + rows for _, row, rows in section.runs):
        expected = "rows without a gap between them"
        raise SegmentMismatch(file, part="rows", found=(first, stop), expected=expected)
    return opened


def _blocks(opened: OpenSection, segment: PayloadSegment) -> Iterator[_Block]:
    bounds: NDArray[np.int64] = opened.row_bounds
    stop_row = segment.row + segment.rows
    index = int(np.searchsorted(bounds, segment.row, side="right")) - 1
    while index < len(bounds) - 1 and bounds[index] < stop_row:
        begin, end = int(bounds[index]), int(bounds[index + 1])
        first, last = max(segment.row, begin), min(stop_row, end)
        yield _Block(
            index=index,
            first=first - begin,
            last=last - begin,
            rows=end - begin,
            start=first - segment.row,
            stop=last - segment.row,
        )
        index += 1


def _read_verified(
    payload: OpenPayload, opened: OpenSection, blocks: list[_Block], stored: list[memoryview]
) -> None:
    """Read neighbouring blocks in one go, then compare each with its checksum."""
    buffers: list[Buffer] = list(stored)
    offset = int(opened.offsets[blocks[0].index])
    read_exactly(payload.fd, buffers, offset, file=payload.file)
    for block, view in zip(blocks, stored, strict=True):
        if checksum(view) != int(opened.checksums[block.index]):
            raise ChecksumMismatch(
                payload.file, block=block.index, offset=int(opened.offsets[block.index])
            )
