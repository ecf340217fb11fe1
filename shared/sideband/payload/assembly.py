"""A payload file in memory: rows as sections of blocks, their places, and the bytes around them.

Blocks of raw rows are views of the caller's arrays, so nothing is copied that need not be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
    """One section being made: its blocks as buffers, then its place in the file."""

    choice: int
    field: Field
    encoding: str
    dtype: RowDtype
    shape: tuple[int, ...]
    layer_ids: tuple[int, ...]
    runs: tuple[Run, ...]
    blocks: list[tuple[int, list[Buffer]]]  # rows, stored bytes in parts
    offset: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the section."""
        return sum(len(part) for _, parts in self.blocks for part in parts)

    @property
    def rows(self) -> int:
        """Rows of the section."""
        return sum(rows for rows, _ in self.blocks)

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
            block_count=len(self.blocks),
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
    bounds = routing_blocks(stored_rows, model, encoding)
    return Part(
        choice=choice,
        field="routed_experts",
        encoding=encoding.name,
        dtype="uint8" if rows_NLK.dtype == np.uint8 else "uint16",
        shape=model.row_shape,
        layer_ids=model.layer_ids,
        runs=_runs(routing.pos, ranges),
        blocks=[
            (last - first, encoding.encode_block(rows_NLK[first:last], model))
            for first, last in pairwise(bounds)
        ],
    )


def mask_part(choice: int, column: MaskColumn, model: ModelShape, encodings: Encodings) -> Part:
    """The rows of a checked column that keep ids; a row without ids is a gap."""
    masks = column.masks.with_ids()
    sampled_N = column.sampled_token_ids_N[np.diff(column.masks.starts_N) > 0]
    encoding = MASK_ENCODINGS[encodings.masks]
    bounds = mask_blocks(masks, model.vocab_size, encoding)
    return Part(
        choice=choice,
        field="sampling_mask",
        encoding=encoding.name,
        dtype="int32",
        shape=(model.vocab_size,),
        layer_ids=(),
        runs=_runs(column.pos, runs_with_ids(column.masks)),
        blocks=[
            (last - first, encoding.encode_block(rows, sampled_N[first:last], model.vocab_size))
            for first, last in pairwise(bounds)
            for rows in (masks.slice(first, last),)
        ],
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
        blocks=[
            (last - first, CSR_F32.encode_block(kept.slice(first, last)))
            for first, last in pairwise(score_blocks(kept, CSR_F32))
        ],
    )


def _runs(pos: int, ranges: Ranges) -> tuple[Run, ...]:
    """Where the rows of ``ranges`` lie in the section: one after the other, without the gaps."""
    runs: list[Run] = []
    row = 0
    for first, last in ranges:
        runs.append((pos + first, row, last - first))
        row += last - first
    return tuple(runs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedFile:
    """Parts with their places. ``body`` follows ``front_bytes`` bytes of ``front``."""

    header: PayloadHeader
    parts: Sequence[Part]
    header_bytes: int
    front_bytes: int
    body: list[Buffer]
    size_bytes: int

    def front(self) -> bytes:
        """Prefix, header and block index; reads every block for its checksum."""
        entries: list[tuple[int, int, int, int]] = []
        for part in self.parts:
            reached = part.offset
            for rows, stored in part.blocks:
                size_bytes = sum(len(buffer) for buffer in stored)
                entries.append((reached, size_bytes, rows, checksum(*stored)))
                reached += size_bytes
        index = np.array(entries, BLOCK_ENTRY)
        front = encode_front(
            self.header, index, header_bytes=self.header_bytes, file_bytes=self.size_bytes
        )
        assert len(front) == self.front_bytes, "the front has the size that was reserved for it"
        return front


def place(
    parts: Sequence[Part],
    *,
    run_id: RunId,
    request_id: RequestId,
    policy_version: int,
    model: ModelShape,
) -> PlacedFile:
    """Give each part its offset. Raises HeaderTooLarge."""

    def header() -> PayloadHeader:
        return PayloadHeader(
            run_id=run_id,
            request_id=request_id,
            policy_version=policy_version,
            model=model,
            sections=tuple(part.section for part in parts),
        )

    header_bytes, front = front_bytes(header())
    reached = front
    body: list[Buffer] = []
    for part in parts:
        body.append(bytes(aligned(reached) - reached))
        part.offset = reached = aligned(reached)
        for _, stored in part.blocks:
            size_bytes = sum(len(buffer) for buffer in stored)
            if size_bytes > BLOCK_BYTES_MAX:
                raise HeaderTooLarge("", "block bytes", size_bytes, limit=BLOCK_BYTES_MAX)
            body.extend(stored)
            reached += size_bytes
    return PlacedFile(
        header=header(),
        parts=parts,
        header_bytes=header_bytes,
        front_bytes=front,
        body=body,
        size_bytes=reached,
    )
