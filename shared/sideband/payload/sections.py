"""What a header's sections and block index must satisfy together, before any row is read."""

import numpy as np
from numpy.typing import NDArray

from sideband.errors import InvalidInput
from sideband.masks.csr_bits import START_BYTES
from sideband.model import ModelShape
from sideband.payload.encodings import CSR_BITS, RAW
from sideband.payload.errors import HeaderCorrupt, SectionsMisplaced
from sideband.payload.header import PayloadHeader, Section
from sideband.payload.layout import BLOCK_BYTES_MAX, aligned
from sideband.segments import POSITION_MAX


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
    if section.field == "routed_experts":
        expected = (model.row_dtype.name, model.row_shape, model.layer_ids)
    elif section.field == "sampling_mask":
        expected = ("int32", (model.vocab_size,), ())
    else:
        return  # a field of a later writer: no segment that this reader knows can name it
    if found != expected:
        raise HeaderCorrupt(file, f"{section.field} is {found}, its model says {expected}")


def check_index(
    sections: tuple[Section, ...],
    index: NDArray[np.void],
    *,
    front_bytes: int,
    file_bytes: int,
    file: str,
) -> None:
    """Raises SectionsMisplaced unless blocks tile their sections and sections tile the file."""
    reached, first = front_bytes, 0
    for section in sections:
        if section.offset != aligned(reached):
            raise SectionsMisplaced(file, f"section at {section.offset}, not {aligned(reached)}")
        _check_blocks(section, index[first : first + section.block_count], file)
        reached = section.offset + section.size_bytes
        first += section.block_count
    if reached != file_bytes:
        raise SectionsMisplaced(file, f"sections end at {reached}, the file at {file_bytes}")


def _check_blocks(section: Section, blocks: NDArray[np.void], file: str) -> None:
    sizes, rows = blocks["size_bytes"].astype(np.int64), blocks["rows"].astype(np.int64)
    ends = section.offset + np.cumsum(sizes)
    if sizes.min() < 1 or rows.min() < 1 or sizes.max() > BLOCK_BYTES_MAX:
        raise SectionsMisplaced(file, f"an empty or oversized block of {section.field}")
    if (blocks["offset"] != (ends - sizes).astype(np.uint64)).any():
        raise SectionsMisplaced(file, f"blocks of {section.field} overlap or leave a hole")
    if int(ends[-1]) != section.offset + section.size_bytes or int(rows.sum()) != section.rows:
        raise SectionsMisplaced(file, f"blocks of {section.field} are not its bytes and rows")
    _check_block_sizes(section, sizes, rows, file)


def _check_block_sizes(
    section: Section, sizes: NDArray[np.int64], rows: NDArray[np.int64], file: str
) -> None:
    """What the encodings of this reader say about a block's size. Others are refused when read."""
    kind = (section.field, section.encoding)
    if kind == ("routed_experts", RAW.name) and (sizes != rows * row_size_bytes(section)).any():
        raise SectionsMisplaced(file, "a raw block is not its rows")
    if kind == ("sampling_mask", CSR_BITS.name) and (sizes < (rows + 1) * START_BYTES).any():
        raise SectionsMisplaced(file, "a packed block lacks its starts")


def row_size_bytes(section: Section) -> int:
    """Bytes of one decoded routing row."""
    size = np.dtype(section.dtype).itemsize
    for width in section.shape:
        size *= width
    return size
