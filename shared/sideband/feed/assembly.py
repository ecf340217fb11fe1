"""From a chunk to the arrays of a rank: reads by handle and inline rows take the same way.

Legend: N rows of the chunk, L columns (layers) out, K experts per layer, M kept ids.

Errors: MalformedStep, ModelMismatch, NoPayloadRoot, RankReadFailed; InvalidInput for layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sideband.batch.rows import PlacedRows, RankRows, input_rows_of, rank_rows, sampled_rows_of
from sideband.batch.types import Align, Chunk
from sideband.feed.codec import decode_chunk
from sideband.feed.errors import MalformedStep, ModelMismatch, NoPayloadRoot
from sideband.feed.frames import Frame
from sideband.feed.layers import (
    Fill,
    LayerChoice,
    RowArray,
    choose_layers,
    fill_invalid,
    place_rows,
)
from sideband.feed.messages import (
    MicroBatchMessage,
)
from sideband.feed.micro_batch import RankMicroBatch
from sideband.feed.pool import ReadPool
from sideband.feed.reads import HandleReads, RetryPlan, RowSource
from sideband.ids import RunId
from sideband.masks.rows import MaskRows
from sideband.model import ModelShape
from sideband.segments import InlineSegment

MakeSource = Callable[[RunId, ModelShape], RowSource | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How the trainer wants its arrays."""

    align: Align = "next"
    layers: tuple[int, ...] | None = None  # decoder layer ids of a pipeline stage
    all_layers: bool = False
    fill: Fill = "zeros"
    model: ModelShape | None = None  # the trainer's own; compared with the sampled one


class Assembler:
    """Builds one micro batch at a time. ``make_source`` opens the payload root at the first need:
    the run may not have written anything before. Not thread-safe: one owner."""

    def __init__(
        self, view: View, *, pool: ReadPool, retry: RetryPlan, make_source: MakeSource
    ) -> None:
        self._view, self._pool, self._retry = view, pool, retry
        self._make_source = make_source
        self._source: RowSource | None = None

    def assemble(self, message: MicroBatchMessage, body: Frame) -> RankMicroBatch:
        """The rank's arrays. Blocks on the reads of rows by handle."""
        own, model = self._view.model, message.model
        if own is not None and model is not None and own != model:
            raise ModelMismatch(own=own, sampled=model)
        chunk = decode_chunk(body, model)
        stray = {segment.field for segment in chunk.segments}.difference(message.fields)
        if stray:
            raise MalformedStep("chunk.segments", f"has {sorted(stray)}, the header has not")
        rows = rank_rows(chunk, self._view.align)
        routing, valid, choice, masks = self._rows_of(chunk, message, rows)
        if self._source is not None and message.index + 1 == message.count:
            self._source.forget_all()  # the step's files may soon be deleted
        return _micro_batch(message, chunk, rows, self._view.align, routing, valid, choice, masks)

    def _rows_of(
        self, chunk: Chunk, message: MicroBatchMessage, rows: RankRows
    ) -> tuple[RowArray | None, NDArray[np.bool_], LayerChoice | None, MaskRows]:
        count, model = len(rows.positions_N), message.model
        valid_N = np.zeros(count, np.bool_)
        masks = sampled_rows_of(chunk, "sampling_mask", self._view.align)
        if model is None or not message.fields:
            return None, valid_N, None, MaskRows.empty(count)
        placed: list[PlacedRows] = []
        choice, out_NLK = None, None
        if "routed_experts" in message.fields:
            choice = choose_layers(
                model, layers=self._view.layers, all_layers=self._view.all_layers
            )
            out_NLK = np.zeros((count, len(choice.layer_ids), model.top_k), model.row_dtype)
            placed = input_rows_of(chunk, "routed_experts")
            for part in placed:
                valid_N[part.start : part.stop] = True
        # a row's kept set is about its label, whatever the alignment
        found = self._fetch(chunk, message, placed, out_NLK, choice, masks, rows.labels_N)
        if out_NLK is not None and choice is not None:
            fill = self._view.fill
            positions_N = rows.positions_N
            fill_invalid(out_NLK, valid_N, positions_N, fill=fill, choice=choice, model=model)
        return out_NLK, valid_N, choice, join_masks(found, rows=count)

    def _fetch(
        self,
        chunk: Chunk,
        message: MicroBatchMessage,
        placed: Sequence[PlacedRows],
        out_NLK: RowArray | None,
        choice: LayerChoice | None,
        masks: Sequence[PlacedRows],
        labels_N: NDArray[np.int32],
    ) -> list[tuple[int, MaskRows]]:
        """Fill routing in place; the kept sets with the first row of each."""
        if chunk.form == "handle" and (placed or masks):
            reads = HandleReads(self._source_for(message), self._pool, self._retry)
            if out_NLK is not None and choice is not None:
                reads.routing(placed, out_NLK, choice)
            found = reads.masks(masks, labels_N)
            reads.run()
            return found
        for part in placed:
            segment = part.segment
            assert isinstance(segment, InlineSegment)
            assert not isinstance(segment.data, MaskRows)
            assert out_NLK is not None
            assert choice is not None
            place_rows(segment.data, out_NLK[part.start : part.stop], choice)
        return [(part.start, _inline_masks(part)) for part in masks]

    def _source_for(self, message: MicroBatchMessage) -> RowSource:
        if self._source is None:
            assert message.model is not None, "decode_chunk refuses segments without a model"
            self._source = self._make_source(RunId(message.run_id), message.model)
            if self._source is None:
                raise NoPayloadRoot(message.step)
        return self._source


def _inline_masks(part: PlacedRows) -> MaskRows:
    assert isinstance(part.segment, InlineSegment)
    assert isinstance(part.segment.data, MaskRows)
    return part.segment.data


def join_masks(parts: Sequence[tuple[int, MaskRows]], *, rows: int) -> MaskRows:
    """CSR rows of the whole chunk from disjoint parts with their first rows, in any order."""
    ordered = sorted(parts, key=lambda part: part[0])
    counts_N = np.zeros(rows, np.int64)
    for start, masks in ordered:
        counts_N[start : start + len(masks)] = np.diff(masks.starts_N)
    starts_N = np.zeros(rows + 1, np.int64)
    np.cumsum(counts_N, out=starts_N[1:])
    ids = [masks.ids_M for _, masks in ordered]
    return MaskRows(starts_N, np.concatenate(ids) if ids else np.zeros(0, np.int32))


def _micro_batch(
    message: MicroBatchMessage,
    chunk: Chunk,
    rows: RankRows,
    align: Align,
    routing_NLK: RowArray | None,
    valid_N: NDArray[np.bool_],
    choice: LayerChoice | None,
    masks: MaskRows,
) -> RankMicroBatch:
    versions_N = rows.weight_versions_N
    return RankMicroBatch(
        run_id=RunId(message.run_id),
        step=message.step,
        index=message.index,
        count=message.count,
        align=align,
        input_ids=rows.input_ids_N[None],
        labels=rows.labels_N[None],
        loss_mask=rows.loss_mask_N[None],
        advantages=rows.advantages_N[None],
        logprobs=rows.logprobs_N[None],
        temperatures=rows.temperatures_N[None],
        position_ids=rows.position_ids_N[None],
        weight_versions=None if versions_N is None else versions_N[None],
        cu_seqlens=rows.cu_seqlens,
        sequence_lengths=rows.sequence_lengths_S,
        sample_ids=tuple(span.sample_id for span in chunk.spans),
        env_names=tuple(span.env_name for span in chunk.spans),
        policy_versions=tuple(span.policy_version for span in chunk.spans),
        packed_positions=rows.positions_N,
        routed_experts=None if routing_NLK is None else routing_NLK[None],
        layer_ids=() if choice is None else choice.layer_ids,
        routing_valid=valid_N[None],
        mask_starts=masks.starts_N,
        mask_ids=masks.ids_M,
    )
