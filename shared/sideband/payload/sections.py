"""What a header's sections and block index must satisfy together, before any row is read."""

from collections.abc import Callable, Iterator
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from sideband.errors import InvalidInput
from sideband.fields import FIELDS, Field
from sideband.model import ModelShape
from sideband.payload.encodings import RAGGED_ENCODINGS, ROUTING_ENCODINGS
from sideband.payload.errors import HeaderCorrupt, SectionsMisplaced
from sideband.payload.header import PayloadHeader, Section
from sideband.payload.layout import BLOCK_BYTES_MAX, aligned
from sideband.segments import POSITION_MAX

_BLOCKS_AT_ONCE: Final = 4096  # of the index as plain numbers, whatever a header claims


def check_sections(header: PayloadHeader, *, file: str) -> None:
    """Raises HeaderCorrupt when a section contradicts the model, the format or itself."""
    try:
        header.model.check()
    except InvalidInput as exc:
        raise HeaderCorrupt(file, str(exc)) from exc
    if not header.sections:
        raise HeaderCorrupt(file, "no section")
    keys = {(section.choice, section.field) for section in header.sections}
    if len(keys) != len(header.sections):
        raise HeaderCorrupt(file, "two sections for one field of one choice")
    for section in header.sections:
        _check_runs(section, file)
        _check_columns(section, header.model, file)


def _check_runs(section: Section, file: str) -> None:
    row, stop = 0, -1
    for pos, first_row, rows in section.runs:
        # A run that touches its neighbour would be one run: then a segment could not span both.
        if first_row != row or pos <= stop or pos + rows > POSITION_MAX:
            raise HeaderCorrupt(file, f"run {(pos, first_row, rows)} of {section.field}")
        row, stop = row + rows, pos + rows
    if row != section.rows:
        raise HeaderCorrupt(file, f"runs hold {row} rows of {section.rows} of {section.field}")


def _check_columns(section: Section, model: ModelShape, file: str) -> None:
    expected: tuple[object, ...]
    found = (section.dtype, section.shape, section.layer_ids)
    field = FIELDS.get(cast("Field", section.field))
    if field is None:
        return  # of a later writer: no segment that this reader knows can name it
    expected = (*field.kind(model), model.layer_ids if field.has_layers else ())
    if found != expected:
        raise HeaderCorrupt(file, f"{section.field} is {found}, its model says {expected}")


def check_index(
    header: PayloadHeader,
    index: NDArray[np.void],
    *,
    front_bytes: int,
    file_bytes: int,
    file: str,
) -> None:
    """Raises SectionsMisplaced unless blocks tile their sections and sections tile the file."""
    reached, first = front_bytes, 0
    for section in header.sections:
        if section.offset != aligned(reached):
            raise SectionsMisplaced(file, f"section at {section.offset}, not {aligned(reached)}")
        _check_blocks(section, header.model, index[first : first + section.block_count], file)
        reached = section.offset + section.size_bytes
        first += section.block_count
    if reached != file_bytes:
        raise SectionsMisplaced(file, f"sections end at {reached}, the file at {file_bytes}")


def _check_blocks(section: Section, model: ModelShape, blocks: NDArray[np.void], file: str) -> None:
    """One pass in plain numbers: most sections have few blocks, where arrays cost far more."""
    bounds = _size_bounds(section, model)
    reached, rows_seen = section.offset, 0
    for offset, size_bytes, rows, _ in _entries_of(blocks):
        if size_bytes < 1 or rows < 1 or size_bytes > BLOCK_BYTES_MAX:
            raise SectionsMisplaced(file, f"an empty or oversized block of {section.field}")
        if offset != reached:
            raise SectionsMisplaced(file, f"blocks of {section.field} overlap or leave a hole")
        least, most = bounds(rows)
        if not least <= size_bytes <= most:
            raise SectionsMisplaced(file, f"a block of {section.field} is not its rows")
        reached += size_bytes
        rows_seen += rows
    if reached != section.offset + section.size_bytes or rows_seen != section.rows:
        raise SectionsMisplaced(file, f"blocks of {section.field} are not its bytes and rows")


def _entries_of(blocks: NDArray[np.void]) -> Iterator[tuple[int, int, int, int]]:
    """Offset, stored bytes, rows and checksum of each block."""
    for first in range(0, len(blocks), _BLOCKS_AT_ONCE):
        yield from blocks[first : first + _BLOCKS_AT_ONCE].tolist()


def _size_bounds(section: Section, model: ModelShape) -> Callable[[int], tuple[int, int]]:
    """(least, most) bytes of a block of so many rows in an encoding of this reader.

    Other encodings are refused when they are read.
    """
    declared = FIELDS.get(cast("Field", section.field))
    if declared is not None and declared.ragged is not None:
        ragged = RAGGED_ENCODINGS[declared.name].get(section.encoding)
        if ragged is not None:
            per_row, more = ragged.bytes_min
            return lambda rows: (rows * per_row + more, BLOCK_BYTES_MAX)
    elif declared is not None:
        routing = ROUTING_ENCODINGS.get(section.encoding)
        if routing is not None:
            return lambda rows: (routing.block_bytes(rows, model),) * 2
    return lambda rows: (1, BLOCK_BYTES_MAX)
