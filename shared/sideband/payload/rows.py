"""Read the rows of one segment: whole blocks, verified, then cut to the rows that were asked for.

Legend: N rows of the segment.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sideband.errors import InvalidInput
from sideband.masks.errors import TokenNotOfRow
from sideband.masks.rows import MaskRows, ScoreRows
from sideband.payload.blocks import (
    Block,
    blocks_of,
    copy_by_loop,
    read_blocks,
    scratch_block,
)
from sideband.payload.columns import RowArray
from sideband.payload.encodings import (
    MASK_ENCODINGS,
    ROUTING_ENCODINGS,
    SCORE_ENCODINGS,
)
from sideband.payload.errors import (
    BlockMalformed,
    SampledTokenMismatch,
    SegmentBeyondSection,
    SegmentMismatch,
    UnsupportedEncoding,
)
from sideband.payload.handles import OpenPayload, OpenSection
from sideband.payload.header import Run, Section
from sideband.payload.table import BlockTable
from sideband.segments import Field, PayloadSegment

Ragged = TypeVar("Ragged", MaskRows, ScoreRows)


def read_routing_rows(payload: OpenPayload, segment: PayloadSegment, out: RowArray) -> None:
    """Fill ``out`` [N, layers, top-k]; whole raw blocks are read where they shall lie."""
    opened = _section_of(payload, segment, "routed_experts")
    encoding = ROUTING_ENCODINGS.get(opened.section.encoding)
    if encoding is None:
        raise UnsupportedEncoding(payload.file, opened.section.encoding)
    table, row, stop = opened.blocks, segment.row, segment.row + segment.rows
    if encoding.is_raw:
        _read_raw(payload, table, row, stop, out.data.cast("B"))
        return
    for block in blocks_of(table, row, stop):
        stored, place = scratch_block(payload, table, block.number), out[block.start : block.stop]
        model = payload.header.model
        try:
            encoding.decode_rows(stored, block.rows, first=block.first, out_NLK=place, model=model)
        except ValueError as exc:
            raise BlockMalformed(payload.file, block=block.number, reason=str(exc)) from exc


def _read_raw(
    payload: OpenPayload, table: BlockTable, row: int, stop: int, out_bytes: memoryview
) -> None:
    """Rows [row, stop) as they lie there, by a compiled loop, and what that leaves one by one."""
    numbers, row_bytes = table.numbers(row, stop), len(out_bytes) // (stop - row)
    skipped = (row - table.rows[numbers.start]) * row_bytes
    left = copy_by_loop(payload, table, numbers, skipped, out_bytes)
    if left < numbers.stop:
        start = max(row, table.rows[left])
        _read_each(payload, table, start, stop, out_bytes[(start - row) * row_bytes :])


def _read_each(
    payload: OpenPayload, table: BlockTable, row: int, stop: int, out_bytes: memoryview
) -> None:
    """Rows [row, stop): whole blocks where they shall lie, edges by way of the scratch."""
    numbers, row_bytes = table.numbers(row, stop), len(out_bytes) // (stop - row)
    first, last, reached = numbers.start, numbers.stop, 0
    if table.rows[first] < row:
        begin, end = table.rows[first], table.rows[first + 1]
        reached = (min(stop, end) - row) * row_bytes
        skipped = (row - begin) * row_bytes
        stored = scratch_block(payload, table, first)
        out_bytes[:reached] = stored[skipped : skipped + reached]
        first += 1
    has_tail = first < last and table.rows[last] > stop
    last -= has_tail
    if first < last:
        begin, reached = reached, (table.rows[last] - row) * row_bytes
        read_blocks(payload, table, range(first, last), out_bytes[begin:reached])
    if has_tail:
        stored = scratch_block(payload, table, last)
        out_bytes[reached:] = stored[: len(out_bytes) - reached]


def read_mask_rows(
    payload: OpenPayload, segment: PayloadSegment, sampled_token_ids_N: NDArray[np.int32]
) -> MaskRows:
    """The kept sets of the segment, N rows, each with the token that was sampled from it."""
    opened = _section_of(payload, segment, "sampling_mask")
    encoding = MASK_ENCODINGS.get(opened.section.encoding)
    if encoding is None:
        raise UnsupportedEncoding(payload.file, opened.section.encoding)

    def decoded(block: Block) -> MaskRows:
        return encoding.decode_rows(
            scratch_block(payload, opened.blocks, block.number),
            block.rows,
            segment.shape[0],
            first=block.first,
            sampled_N=sampled_token_ids_N[block.start : block.stop],
        )

    return MaskRows.gathered(_each(payload, opened, segment, decoded))


def read_score_rows(payload: OpenPayload, segment: PayloadSegment) -> ScoreRows:
    """The scores of the segment, N rows."""
    opened = _section_of(payload, segment, segment.field)
    encoding = SCORE_ENCODINGS.get(opened.section.encoding)
    if encoding is None:
        raise UnsupportedEncoding(payload.file, opened.section.encoding)

    def decoded(block: Block) -> ScoreRows:
        return encoding.decode_rows(
            scratch_block(payload, opened.blocks, block.number),
            block.rows,
            segment.shape[0],
            first=block.first,
            count=block.last - block.first,
        )

    return ScoreRows.gathered(_each(payload, opened, segment, decoded))


def _each(
    payload: OpenPayload,
    opened: OpenSection,
    segment: PayloadSegment,
    decoded: Callable[[Block], Ragged],
) -> Iterator[Ragged]:
    """What each block holds of the segment, its faults named."""
    for block in blocks_of(opened.blocks, segment.row, segment.row + segment.rows):
        try:
            yield decoded(block)
        except TokenNotOfRow as exc:
            row = block.start + exc.row
            raise SampledTokenMismatch(payload.file, row=row, token_id=exc.token_id) from exc
        except InvalidInput as exc:
            raise BlockMalformed(payload.file, block=block.number, reason=str(exc)) from exc


def _section_of(payload: OpenPayload, segment: PayloadSegment, field: Field) -> OpenSection:
    """The section that the segment names, after it was held against all that the file says."""
    file = payload.file
    opened = payload.sections.get(segment.offset)
    if opened is None:
        offsets = sorted(payload.sections)
        raise SegmentMismatch(file, part="offset", found=segment.offset, expected=offsets)
    section = opened.section
    if not (  # a caller may ask for masks with a segment of routing
        field == segment.field == section.field
        and segment.dtype == section.dtype
        and segment.shape == section.shape
    ):
        raise _mismatch(file, segment, section, field)
    first, stop = segment.row, segment.row + segment.rows
    if stop > section.rows:
        raise SegmentBeyondSection(file, row=first, rows=segment.rows, section_rows=section.rows)
    run = 0 if len(section.runs) == 1 else bisect_right(section.runs, first, key=_row_of_run) - 1
    _, run_row, run_rows = section.runs[run]
    if not run_row <= first < stop <= run_row + run_rows:
        expected = "rows without a gap between them"
        raise SegmentMismatch(file, part="rows", found=(first, stop), expected=expected)
    return opened


def _mismatch(
    file: str, segment: PayloadSegment, section: Section, field: Field
) -> SegmentMismatch:
    """The first part in which the segment, what is asked for, and the section differ."""
    if segment.field != field:
        return SegmentMismatch(file, part="field", found=segment.field, expected=field)
    part = next(
        part
        for part in ("field", "dtype", "shape")
        if getattr(segment, part) != getattr(section, part)
    )
    return SegmentMismatch(
        file, part=part, found=getattr(segment, part), expected=getattr(section, part)
    )


def _row_of_run(run: Run) -> int:
    return run[1]
