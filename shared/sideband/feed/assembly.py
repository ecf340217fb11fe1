"""From a chunk to the arrays of a rank: reads by handle and inline rows take the same way.

Legend: N rows of the chunk, L columns (layers) out, K experts per layer, M kept ids.

Errors: MalformedStep, ModelMismatch, NoPayloadRoot, RankReadFailed; InvalidInput for layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sideband.batch.rows import PlacedRows, RankRows, input_rows_of, rank_rows, sampled_rows_of
from sideband.batch.types import Align, Chunk
from sideband.feed.codec import decode_chunk
from sideband.feed.errors import MalformedStep, ModelMismatch, NoPayloadRoot, RowsDisagree
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
from sideband.fields import SAMPLED_FIELDS, Field
from sideband.ids import RunId
from sideband.masks.rows import MaskRows, RaggedRows, ScoreRows
from sideband.model import ModelShape
from sideband.segments import InlineSegment

Ragged = TypeVar("Ragged", MaskRows, ScoreRows)
RaggedParts = Sequence[tuple[int, MaskRows | ScoreRows]]  # with the first row of each
MakeSource = Callable[[RunId, ModelShape], RowSource | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How the trainer wants its arrays."""

    align: Align = "next"
    layers: tuple[int, ...] | None = None  # decoder layer ids of a pipeline stage
    all_layers: bool = False
    fill: Fill = "zeros"
    model: ModelShape | None = None  # the trainer's own; compared with the sampled one


@dataclass(slots=True, kw_only=True, eq=False)
class FoundRows:
    """The rows of every field, as the rank gets them: [N, L, K] routing, M kept ids."""

    valid_N: NDArray[np.bool_]
    masks: MaskRows
    routing_NLK: RowArray | None = None
    choice: LayerChoice | None = None
    logprobs_M: NDArray[np.float32] | None = None


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
        found = self._rows_of(chunk, message, rows)
        if self._source is not None and message.index + 1 == message.count:
            self._source.forget_all()  # the step's files may soon be deleted
        return _micro_batch(message, chunk, rows, self._view.align, found)

    def _rows_of(self, chunk: Chunk, message: MicroBatchMessage, rows: RankRows) -> FoundRows:
        count, model = len(rows.positions_N), message.model
        found = FoundRows(valid_N=np.zeros(count, np.bool_), masks=MaskRows.empty(count))
        if model is None or not message.fields:
            return found
        placed: list[PlacedRows] = []
        if "routed_experts" in message.fields:
            found.choice = choose_layers(
                model, layers=self._view.layers, all_layers=self._view.all_layers
            )
            shape = (count, len(found.choice.layer_ids), model.top_k)
            found.routing_NLK = np.zeros(shape, model.row_dtype)
            placed = input_rows_of(chunk, "routed_experts")
            for part in placed:
                found.valid_N[part.start : part.stop] = True
        sampled = {
            field: sampled_rows_of(chunk, field, self._view.align) for field in SAMPLED_FIELDS
        }
        # what was sampled at a row is its label, whatever the alignment
        parts = self._fetch(chunk, message, placed, found, sampled, rows.labels_N)
        if found.routing_NLK is not None and found.choice is not None:
            fill_invalid(
                found.routing_NLK,
                found.valid_N,
                rows.positions_N,
                fill=self._view.fill,
                choice=found.choice,
                model=model,
            )
        found.masks = join_rows(MaskRows, parts["sampling_mask"], rows=count)
        if "sampling_mask_logprobs" in message.fields:
            found.logprobs_M = follow(found.masks, parts["sampling_mask_logprobs"])
        return found

    def _fetch(
        self,
        chunk: Chunk,
        message: MicroBatchMessage,
        placed: Sequence[PlacedRows],
        found: FoundRows,
        sampled: Mapping[Field, Sequence[PlacedRows]],
        labels_N: NDArray[np.int32],
    ) -> Mapping[Field, RaggedParts]:
        """Fill routing in place; of each field about what was sampled, its parts."""
        routing_NLK, choice = found.routing_NLK, found.choice
        if chunk.form == "handle" and (placed or any(sampled.values())):
            reads = HandleReads(self._source_for(message), self._pool, self._retry)
            if routing_NLK is not None and choice is not None:
                reads.routing(placed, routing_NLK, choice)
            parts = {field: reads.ragged(own, labels_N) for field, own in sampled.items()}
            reads.run()
            return parts
        for part in placed:
            segment = part.segment
            assert isinstance(segment, InlineSegment)
            assert isinstance(segment.data, np.ndarray)
            assert routing_NLK is not None
            assert choice is not None
            place_rows(segment.data, routing_NLK[part.start : part.stop], choice)
        return {
            field: [(part.start, _inline_rows(part)) for part in own]
            for field, own in sampled.items()
        }

    def _source_for(self, message: MicroBatchMessage) -> RowSource:
        if self._source is None:
            assert message.model is not None, "decode_chunk refuses segments without a model"
            self._source = self._make_source(RunId(message.run_id), message.model)
            if self._source is None:
                raise NoPayloadRoot(message.step)
        return self._source


def _inline_rows(part: PlacedRows) -> MaskRows | ScoreRows:
    assert isinstance(part.segment, InlineSegment)
    assert isinstance(part.segment.data, RaggedRows)
    return part.segment.data


def join_rows(kind: type[Ragged], parts: RaggedParts, *, rows: int) -> Ragged:
    """Rows of the whole chunk from disjoint parts with their first rows, in any order."""
    ordered = sorted(parts, key=lambda part: part[0])
    counts_N = np.zeros(rows, np.int64)
    for start, part in ordered:
        counts_N[start : start + len(part)] = np.diff(part.starts_N)
    starts_N = np.zeros(rows + 1, np.int64)
    np.cumsum(counts_N, out=starts_N[1:])
    values = [part.values_M for _, part in ordered]
    return kind(starts_N, np.concatenate(values) if values else np.zeros(0, kind.dtype))


def follow(masks: MaskRows, parts: RaggedParts) -> NDArray[np.float32]:
    """One logprob per kept id, NaN where none was reported. Raises RowsDisagree."""
    logprobs_M = np.full(len(masks.ids_M), np.nan, np.float32)
    for start, scores in parts:
        stop = start + len(scores)
        wanted_N = np.diff(masks.starts_N[start : stop + 1])
        differs_N = np.diff(scores.starts_N) != wanted_N
        if differs_N.any():
            row = int(differs_N.argmax())
            counts = (len(scores[row]), int(wanted_N[row]))
            raise RowsDisagree(
                "sampling_mask_logprobs", "sampling_mask", row=start + row, counts=counts
            )
        logprobs_M[masks.starts_N[start] : masks.starts_N[stop]] = scores.values_M
    return logprobs_M


def _micro_batch(
    message: MicroBatchMessage,
    chunk: Chunk,
    rows: RankRows,
    align: Align,
    found: FoundRows,
) -> RankMicroBatch:
    versions_N = rows.weight_versions_N
    return RankMicroBatch(
        run_id=RunId(message.run_id),
        lineage=message.lineage,
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
        routed_experts=None if found.routing_NLK is None else found.routing_NLK[None],
        layer_ids=() if found.choice is None else found.choice.layer_ids,
        routing_valid=found.valid_N[None],
        mask_starts=found.masks.starts_N,
        mask_ids=found.masks.ids_M,
        mask_logprobs=found.logprobs_M,
    )
