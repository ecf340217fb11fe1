"""Write one request's rows as one payload file, all or nothing.

Rows are checked, then encoded block by block, then written aside without being joined; the file
is synced, renamed and its folders synced before the call returns (docs/payload-format.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sideband.errors import InvalidInput
from sideband.ids import RequestId, check_id
from sideband.model import ModelShape, RowDtype
from sideband.payload.checks import check_masks, valid_runs
from sideband.payload.columns import ChoicePayload, MaskColumn, RoutingRows
from sideband.payload.encodings import CSR_BITS, RAW, mask_blocks, routing_blocks
from sideband.payload.errors import HeaderTooLarge
from sideband.payload.header import PayloadHeader, Run, Section, encode_front, front_bytes
from sideband.payload.io import write_all
from sideband.payload.layout import (
    BLOCK_BYTES_MAX,
    BLOCK_ENTRY,
    CHOICE_MAX,
    Buffer,
    aligned,
    checksum,
)
from sideband.payload.paths import new_path
from sideband.payload.refusals import DuplicateChoice
from sideband.payload.root import PayloadRoot, published
from sideband.segments import Field, PayloadSegment


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteReport:
    """What was published. ``file`` is None when there was no row to write.

    ``segments`` has an entry for every choice; they are in the request's own positions.
    ``rows_invalid`` counts routing rows that were left out as gaps.
    """

    file: str | None
    segments: Mapping[int, tuple[PayloadSegment, ...]]
    size_bytes: int
    rows_invalid: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Part:
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
        return sum(len(part) for _, parts in self.blocks for part in parts)

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.blocks)


def write_payload(
    root: PayloadRoot,
    *,
    policy_version: int,
    request_id: RequestId,
    model: ModelShape,
    choices: Sequence[ChoicePayload],
) -> WriteReport:
    """Publish the rows of one request. Blocks: use a thread.

    Returns only when the file would survive a power cut. Arrays must not change meanwhile.
    Raises a PayloadRefused when a row breaks a rule (nothing is written), HeaderTooLarge,
    PathEscapesRoot, WriteFailed (nothing is left but, at worst, a staging file for the sweep);
    InvalidInput for an id, a model or a choice that cannot be.
    """
    check_id("request_id", request_id)
    model.check()
    parts, rows_invalid = _parts(choices, model)
    if not parts:
        nothing: dict[int, tuple[PayloadSegment, ...]] = {c.choice: () for c in choices}
        return WriteReport(file=None, segments=nothing, size_bytes=0, rows_invalid=rows_invalid)
    path = new_path(policy_version, root.run_id, request_id)
    header = PayloadHeader(
        run_id=root.run_id,
        request_id=request_id,
        policy_version=policy_version,
        model=model,
        sections=tuple(map(_section, parts)),
    )
    buffers, size_bytes = _assemble(header, parts)
    with published(root, path) as fd:
        write_all(fd, buffers)
    segments = {
        choice.choice: tuple(
            segment
            for part in parts
            if part.choice == choice.choice
            for segment in _segments(part, str(path))
        )
        for choice in choices
    }
    return WriteReport(
        file=str(path), segments=segments, size_bytes=size_bytes, rows_invalid=rows_invalid
    )


def _parts(choices: Sequence[ChoicePayload], model: ModelShape) -> tuple[list[_Part], int]:
    """Every section to write, after every check; and the number of invalid rows."""
    parts: list[_Part] = []
    rows_invalid = 0
    seen: set[int] = set()
    for choice in choices:
        if not 0 <= choice.choice <= CHOICE_MAX:
            raise InvalidInput("choice", choice.choice, f"must lie in [0, {CHOICE_MAX}]")
        if choice.choice in seen:
            raise DuplicateChoice(choice.choice)
        seen.add(choice.choice)
        if choice.routing is not None:
            part = _routing_part(choice.choice, choice.routing, model)
            rows_invalid += len(choice.routing.rows_NLK) - part.rows
            parts.append(part)
        if choice.masks is not None:
            parts.append(_mask_part(choice.choice, choice.masks, model))
    return [part for part in parts if part.blocks], rows_invalid


def _routing_part(choice: int, routing: RoutingRows, model: ModelShape) -> _Part:
    ranges = valid_runs(routing, model)
    rows_NLK = routing.rows_NLK
    if ranges != [(0, len(rows_NLK))] and ranges:  # leaving rows out costs one copy
        rows_NLK = np.concatenate([rows_NLK[first:last] for first, last in ranges])
    runs: list[Run] = []
    row = 0
    for first, last in ranges:
        runs.append((routing.pos + first, row, last - first))
        row += last - first
    bounds = routing_blocks(row, model.row_size_bytes)
    return _Part(
        choice=choice,
        field="routed_experts",
        encoding=RAW.name,
        dtype="uint8" if rows_NLK.dtype == np.uint8 else "uint16",
        shape=model.row_shape,
        layer_ids=model.layer_ids,
        runs=tuple(runs),
        blocks=[
            (last - first, RAW.encode_block(rows_NLK[first:last]))
            for first, last in pairwise(bounds)
        ],
    )


def _mask_part(choice: int, column: MaskColumn, model: ModelShape) -> _Part:
    check_masks(column, model)
    masks = column.masks
    bounds = mask_blocks(masks, model.vocab_size)
    return _Part(
        choice=choice,
        field="sampling_mask",
        encoding=CSR_BITS.name,
        dtype="int32",
        shape=(model.vocab_size,),
        layer_ids=(),
        runs=((column.pos, 0, len(masks)),) if len(masks) else (),
        blocks=[
            (last - first, CSR_BITS.encode_block(masks.slice(first, last), model.vocab_size))
            for first, last in pairwise(bounds)
        ],
    )


def _section(part: _Part) -> Section:
    return Section(
        choice=part.choice,
        field=part.field,
        encoding=part.encoding,
        dtype=part.dtype,
        shape=part.shape,
        layer_ids=part.layer_ids,
        offset=part.offset,
        size_bytes=part.size_bytes,
        rows=part.rows,
        runs=part.runs,
        block_count=len(part.blocks),
    )


def _assemble(header: PayloadHeader, parts: Sequence[_Part]) -> tuple[list[Buffer], int]:
    """All buffers of the file in order, and its size. Places the parts."""
    header_bytes, reached = front_bytes(header)
    body: list[Buffer] = []
    entries: list[tuple[int, int, int, int]] = []
    for part in parts:
        body.append(bytes(aligned(reached) - reached))
        part.offset = reached = aligned(reached)
        for rows, stored in part.blocks:
            size_bytes = sum(len(buffer) for buffer in stored)
            if size_bytes > BLOCK_BYTES_MAX:
                raise HeaderTooLarge("", "block bytes", size_bytes, limit=BLOCK_BYTES_MAX)
            entries.append((reached, size_bytes, rows, checksum(*stored)))
            body.extend(stored)
            reached += size_bytes
    placed = PayloadHeader(
        run_id=header.run_id,
        request_id=header.request_id,
        policy_version=header.policy_version,
        model=header.model,
        sections=tuple(map(_section, parts)),
    )
    index = np.array(entries, BLOCK_ENTRY)
    front = encode_front(placed, index, header_bytes=header_bytes, file_bytes=reached)
    return [front, *body], reached


def _segments(part: _Part, file: str) -> list[PayloadSegment]:
    return [
        PayloadSegment(
            field=part.field,
            file=file,
            offset=part.offset,
            row=row,
            pos=pos,
            rows=rows,
            dtype=part.dtype,
            shape=part.shape,
        )
        for pos, row, rows in part.runs
    ]
