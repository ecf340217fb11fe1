"""The reads of one rank's chunk: segments, the whole blocks that they lie in, calls for both."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.files import pread_into
from sideband.model import ModelShape
from sideband.payload.encodings import routing_blocks
from sideband.payload.reader import PayloadReader
from sideband.segments import PayloadSegment

Range = tuple[int, int]  # offset, bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """The segments of one rank's chunk, and the whole blocks that they lie in."""

    segments: list[PayloadSegment]
    ranges: list[Range]

    @property
    def rows(self) -> int:
        """Rows that the rank gets."""
        return sum(segment.rows for segment in self.segments)

    @property
    def row_bytes(self) -> int:
        """Bytes of these rows."""
        return sum(_row_bytes(segment) * segment.rows for segment in self.segments)

    @property
    def block_bytes(self) -> int:
        """Bytes of the whole blocks."""
        return sum(size for _, size in self.ranges)


def chosen_reads(
    files: Sequence[PayloadSegment], segment_rows: int, *, read_bytes_max: int
) -> Reads:
    """Segments of equal length at random rows, as many as the byte budget allows (at most 400)."""
    rng = random.Random(segment_rows)
    segments: list[PayloadSegment] = []
    ranges: list[Range] = []
    read_bytes = 0
    while not segments or (read_bytes < read_bytes_max and len(segments) < 400):
        file = files[len(segments) % len(files)]
        first = rng.randrange(file.rows - min(segment_rows, file.rows) + 1)
        segment = file.narrowed(file.pos + first, file.pos + min(first + segment_rows, file.rows))
        segments.append(segment)
        ranges.append(whole_blocks(file, segment))
        read_bytes += ranges[-1][1]
    return Reads(segments=segments, ranges=ranges)


def _model_of(file: PayloadSegment) -> ModelShape:
    """A model whose rows are as large as the file's."""
    layers, top_k = file.shape
    return ModelShape(
        num_layers=layers,
        layer_ids=tuple(range(layers)),
        top_k=top_k,
        id_space=256 if file.dtype == "uint8" else 1 << 16,
        vocab_size=1,
    )


def whole_blocks(file: PayloadSegment, segment: PayloadSegment) -> Range:
    """The bytes of all blocks that the segment touches; rows are stored raw."""
    size = _row_bytes(file)
    bounds = np.array(routing_blocks(file.rows, _model_of(file)))
    first = bounds[np.searchsorted(bounds, segment.row, side="right") - 1]
    last = bounds[np.searchsorted(bounds, segment.row + segment.rows, side="left")]
    return segment.offset + int(first) * size, int(last - first) * size


def reader_calls(
    reader: PayloadReader, reads: Reads, out: NDArray[np.uint8]
) -> list[Callable[[], None]]:
    """One call per segment, each into its own part of ``out``."""
    calls: list[Callable[[], None]] = []
    start = 0
    for segment in reads.segments:
        size = _row_bytes(segment) * segment.rows
        rows = out[start : start + size]
        typed = rows if segment.dtype == "uint8" else rows.view(np.uint16)
        place = typed.reshape(segment.rows, *segment.shape)
        calls.append(lambda s=segment, o=place: reader.read_routing(s, o))  # type: ignore[misc]
        start += size
    return calls


def plain_calls(
    fds: dict[str, int], reads: Reads, buffer: NDArray[np.uint8]
) -> list[Callable[[], None]]:
    """The same whole blocks by plain system calls."""
    calls: list[Callable[[], None]] = []
    view, start = buffer.data, 0
    for segment, one in zip(reads.segments, reads.ranges, strict=True):
        part = view[start : start + one[1]]
        fd = fds[segment.file]
        calls.append(lambda f=fd, r=one, p=part: pread_into(f, [r], p))  # type: ignore[misc]
        start += one[1]
    return calls


def _row_bytes(segment: PayloadSegment) -> int:
    return segment.shape[0] * segment.shape[1] * (1 if segment.dtype == "uint8" else 2)
