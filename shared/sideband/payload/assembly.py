"""A payload file in the making: rows as sections of blocks, their places, the front before them.

A block is encoded when its turn to be written comes, so that little of a file is ever in memory.
Blocks of raw rows are views of the caller's arrays: nothing is copied that need not be.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from sideband.fields import FIELDS
from sideband.ids import RequestId, RunId
from sideband.masks.rows import ScoreRows
from sideband.masks.rules import runs_with_ids
from sideband.model import ModelShape, RowDtype
from sideband.payload.columns import MaskColumn, RoutingRows
from sideband.payload.encodings import (
    CSR_F32,
    MASK_ENCODINGS,
    Encodings,
    mask_blocks,
    routing_blocks,
    score_blocks,
)
from sideband.payload.errors import HeaderTooLarge
from sideband.payload.header import PayloadHeader, Run, Section, encode_front, front_bytes
from sideband.payload.layout import BLOCK_BYTES_MAX, BLOCK_ENTRY, Buffer, aligned, checksum
from sideband.segments import Field, PayloadSegment

Ranges = list[tuple[int, int]]  # [first, last) of the rows that are stored, ascending


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """One section being made. Its place and size are known once its blocks were encoded."""

    choice: int
    field: Field
    encoding: str
    dtype: RowDtype
    shape: tuple[int, ...]
    layer_ids: tuple[int, ...]
    runs: tuple[Run, ...]
    bounds: Sequence[int]  # rows [bounds[i], bounds[i + 1]) are block i
    encode: Callable[[int, int], list[Buffer]]  # the stored bytes of rows [first, last), in parts
    offset: int = 0
    size_bytes: int = 0

    @property
    def rows(self) -> int:
        """Rows of the section."""
        return self.bounds[-1]

    @property
    def section(self) -> Section:
        """What the header says about it."""
        return Section(
            choice=self.choice,
            field=self.field,
            encoding=self.encoding,
            dtype=self.dtype,
            shape=self.shape,
            layer_ids=self.layer_ids,
            offset=self.offset,
            size_bytes=self.size_bytes,
            rows=self.rows,
            runs=self.runs,
            block_count=len(self.bounds) - 1,
        )

    def segments(self, file: str) -> list[PayloadSegment]:
        """One per run, in the request's own positions."""
        return [
            PayloadSegment(
                field=self.field,
                file=file,
                offset=self.offset,
                row=row,
                pos=pos,
                rows=rows,
                dtype=self.dtype,
                shape=self.shape,
            )
            for pos, row, rows in self.runs
        ]


def routing_part(
    choice: int, routing: RoutingRows, ranges: Ranges, model: ModelShape, encodings: Encodings
) -> Part:
    """The rows of ``ranges``, which were checked or are about to be."""
    rows_NLK = routing.rows_NLK
    if ranges != [(0, len(rows_NLK))] and ranges:  # leaving rows out costs one copy
        rows_NLK = np.concatenate([rows_NLK[first:last] for first, last in ranges])
    stored_rows = sum(last - first for first, last in ranges)
    encoding = encodings.routing_of(model)
    return Part(
        choice=choice,
        field="routed_experts",
        encoding=encoding.name,
        dtype="uint8" if rows_NLK.dtype == np.uint8 else "uint16",
        shape=model.row_shape,
        layer_ids=model.layer_ids,
        runs=_runs(routing.pos, ranges),
        bounds=routing_blocks(stored_rows, model, encoding),
        encode=lambda first, last: encoding.encode_block(rows_NLK[first:last], model),
    )


def mask_part(choice: int, column: MaskColumn, model: ModelShape, encodings: Encodings) -> Part:
    """The rows of a checked column that keep ids; a row without ids is a gap."""
    masks = column.masks.with_ids()
    sampled_N = column.sampled_token_ids_N[np.diff(column.masks.starts_N) > 0]
    encoding = MASK_ENCODINGS[encodings.masks]
    return Part(
        choice=choice,
        field="sampling_mask",
        encoding=encoding.name,
        dtype="int32",
        shape=(model.vocab_size,),
        layer_ids=(),
        runs=_runs(column.pos, runs_with_ids(column.masks)),
        bounds=mask_blocks(masks, model.vocab_size, encoding),
        encode=lambda first, last: encoding.encode_block(
            masks.slice(first, last), sampled_N[first:last], model.vocab_size
        ),
    )


def score_part(choice: int, column: MaskColumn, scores: ScoreRows, model: ModelShape) -> Part:
    """The logprobs of the rows that keep ids: where the kept sets have gaps there are none."""
    kept = scores.with_ids()
    dtype, shape = FIELDS["sampling_mask_logprobs"].kind(model)
    return Part(
        choice=choice,
        field="sampling_mask_logprobs",
        encoding=CSR_F32.name,
        dtype=dtype,
        shape=shape,
        layer_ids=(),
        runs=_runs(column.pos, runs_with_ids(scores)),
        bounds=score_blocks(kept, CSR_F32),
        encode=lambda first, last: CSR_F32.encode_block(kept.slice(first, last)),
    )


def _runs(pos: int, ranges: Ranges) -> tuple[Run, ...]:
    """Where the rows of ``ranges`` lie in the section: one after the other, without the gaps."""
    runs: list[Run] = []
    row = 0
    for first, last in ranges:
        runs.append((pos + first, row, last - first))
        row += last - first
    return tuple(runs)


@dataclass(slots=True, kw_only=True, eq=False)
class FileInMaking:
    """A file whose ``body`` is made first and whose ``front_bytes`` bytes of ``front`` last.

    Making one raises HeaderTooLarge.
    """

    run_id: RunId
    request_id: RequestId
    policy_version: int
    model: ModelShape
    parts: Sequence[Part]
    header_bytes: int = field(init=False)
    front_bytes: int = field(init=False)
    size_bytes: int = field(init=False)  # of what was made so far
    _index: list[tuple[int, int, int, int]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.header_bytes, self.front_bytes = front_bytes(self._header())
        self.size_bytes = self.front_bytes

    def body(self) -> Iterator[list[Buffer]]:
        """The bytes after the front, block by block, once. Gives each part its place.

        Raises HeaderTooLarge.
        """
        for part in self.parts:
            part.offset = aligned(self.size_bytes)
            padding: list[Buffer] = [bytes(part.offset - self.size_bytes)]
            self.size_bytes = part.offset
            for first, last in pairwise(part.bounds):
                stored = part.encode(first, last)
                size_bytes = sum(len(buffer) for buffer in stored)
                if size_bytes > BLOCK_BYTES_MAX:
                    raise HeaderTooLarge("", "block bytes", size_bytes, limit=BLOCK_BYTES_MAX)
                entry = (self.size_bytes, size_bytes, last - first, checksum(*stored))
                self._index.append(entry)
                self.size_bytes += size_bytes
                part.size_bytes += size_bytes
                yield padding + stored
                padding = []

    def front(self) -> bytes:
        """Prefix, header and block index, once the whole body was made."""
        front = encode_front(
            self._header(),
            np.array(self._index, BLOCK_ENTRY),
            header_bytes=self.header_bytes,
            file_bytes=self.size_bytes,
        )
        assert len(front) == self.front_bytes, "the front has the size that was reserved for it"
        return front

    def _header(self) -> PayloadHeader:
        return PayloadHeader(
            run_id=self.run_id,
            request_id=self.request_id,
            policy_version=self.policy_version,
            model=self.model,
            sections=tuple(part.section for part in self.parts),
        )
