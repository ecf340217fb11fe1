"""What one rank gets from its chunk: the shift to labels, positions, boundaries, and where rows go.

``align="next"``: row i's input is token i; its label, loss mask, advantage, logprob, temperature,
weight version and kept set are those of token i + 1, and neutral where the sequence ends.
``align="token"``: everything at row t is about token t, and the trainer shifts. Routing is about
the input token under both.

Legend: N rows of the chunk, E tokens of the chunk with its edge tokens, S sequences of the row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sideband.batch.chunks import Window, cut_to_windows, positions_of
from sideband.batch.columns import Column, Runs
from sideband.batch.types import Align, Chunk
from sideband.fields import Field
from sideband.segments import AnySegment, by_field

# What a row carries where no token was sampled: harmless under any loss that forgets the mask.
IGNORED_LABEL: Final = -100  # torch's cross entropy skips it
NEUTRAL_ADVANTAGE: Final = 0.0
NEUTRAL_LOGPROB: Final = 0.0
NEUTRAL_TEMPERATURE: Final = 1.0  # logits are divided by it
UNKNOWN_WEIGHT_VERSION: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRows:
    """All arrays of one rank's micro batch but routing and masks.

    ``position_ids_N`` count from each sequence's start, through its pads. ``cu_seqlens`` are the
    padded boundaries of the whole packed row, [0, ..., L], equal on all CP ranks;
    ``sequence_lengths_S`` the real lengths, 0 for the padding at the row's end.
    """

    input_ids_N: NDArray[np.int32]
    labels_N: NDArray[np.int32]
    loss_mask_N: NDArray[np.bool_]
    advantages_N: NDArray[np.float32]
    logprobs_N: NDArray[np.float32]
    temperatures_N: NDArray[np.float32]
    position_ids_N: NDArray[np.int32]
    weight_versions_N: NDArray[np.int32] | None
    cu_seqlens: NDArray[np.int32]
    sequence_lengths_S: NDArray[np.int32]
    positions_N: NDArray[np.int64]  # in the packed row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedRows:
    """Where a segment's rows go: row ``start + i`` of the chunk takes row i of ``segment``."""

    start: int
    segment: AnySegment

    @property
    def stop(self) -> int:
        """First chunk row after the segment's."""
        return self.start + self.segment.rows


def rank_rows(chunk: Chunk, align: Align) -> RankRows:
    """The arrays of one rank. The chunk must be one that ``cut_chunk`` makes."""
    positions_N = positions_of(chunk.pieces, edges=False)
    index_N = _rows_in_E(chunk)
    starts_S = np.array([span.start for span in chunk.spans], np.int64)
    lengths_S = np.array([span.length for span in chunk.spans], np.int32)
    span_N = np.searchsorted(starts_S, positions_N, side="right") - 1
    offset_N = positions_N - starts_S[span_N]
    step = 1 if align == "next" else 0
    described_N = offset_N + step < lengths_S[span_N]
    source_N = np.where(described_N, index_N + step, 0)

    def column(values_E: Column, neutral: float) -> Column:
        return np.where(described_N, values_E[source_N], values_E.dtype.type(neutral))

    versions = chunk.weight_versions
    return RankRows(
        input_ids_N=chunk.token_ids_E[index_N],
        labels_N=_int32(column(chunk.token_ids_E, IGNORED_LABEL)),
        loss_mask_N=described_N & chunk.loss_mask_E[source_N],
        advantages_N=_float32(column(_dense(chunk.advantages), NEUTRAL_ADVANTAGE)),
        logprobs_N=_float32(column(chunk.logprobs_E, NEUTRAL_LOGPROB)),
        temperatures_N=_float32(column(_dense(chunk.temperatures), NEUTRAL_TEMPERATURE)),
        position_ids_N=offset_N.astype(np.int32),
        weight_versions_N=None
        if versions is None
        else _int32(column(_dense(versions), UNKNOWN_WEIGHT_VERSION)),
        cu_seqlens=np.array([0, *(span.stop for span in chunk.spans)], np.int32),
        sequence_lengths_S=lengths_S,
        positions_N=positions_N,
    )


def _dense(column: Runs) -> Column:
    return column.expand()


def _int32(column: Column) -> NDArray[np.int32]:
    return column.astype(np.int32, copy=False)


def _float32(column: Column) -> NDArray[np.float32]:
    return column.astype(np.float32, copy=False)


def _rows_in_E(chunk: Chunk) -> NDArray[np.int64]:
    """The index of each of the N rows among the E tokens: all but the edges."""
    counts = np.array([piece.stop - piece.start for piece in chunk.pieces], np.int64)
    edges = np.array([piece.has_edge for piece in chunk.pieces], np.int64)
    edges_before = np.cumsum(edges) - edges
    return np.arange(counts.sum()) + np.repeat(edges_before, counts)


def input_rows_of(chunk: Chunk, field: Field) -> list[PlacedRows]:
    """Which rows of the chunk each segment of a field about inputs fills; ascending, disjoint,
    gaps left out."""
    windows = [(piece.start, piece.stop) for piece in chunk.pieces]
    counts = [stop - start for start, stop in windows]
    row_starts = np.cumsum([0, *counts])[:-1].tolist()
    return _placed(chunk, field, windows, row_starts)


def sampled_rows_of(chunk: Chunk, field: Field, align: Align) -> list[PlacedRows]:
    """Which rows of the chunk each segment of a field about sampled tokens fills.

    Under "next" what is about position p goes to the row of p - 1: rows [a + 1, b + 1) of a
    piece are used, and none that another sequence's row would need. Segments come back cut to
    what is used, so that nothing else is read.
    """
    windows, row_starts = [], []
    for positions, row in _described(chunk, 1 if align == "next" else 0):
        windows.append(positions)
        row_starts.append(row)
    return _placed(chunk, field, windows, row_starts)


def _described(chunk: Chunk, step: int) -> Iterator[tuple[Window, int]]:
    """Positions that the chunk's rows describe, per piece and sequence, with their first row."""
    spans, index, row_start = chunk.spans, 0, 0
    for piece in chunk.pieces:
        while spans[index].stop <= piece.start:
            index += 1
        at = index
        while at < len(spans) and spans[at].start < piece.stop:
            span = spans[at]
            first = max(piece.start, span.start)
            last = min(piece.stop, span.start + span.length - step)
            if first < last:
                yield (first + step, last + step), row_start + first - piece.start
            at += 1
        row_start += piece.stop - piece.start


def _placed(
    chunk: Chunk, field: Field, windows: Sequence[Window], row_starts: Sequence[int]
) -> list[PlacedRows]:
    segments = by_field(chunk.segments, field)
    return [
        PlacedRows(start=row_starts[index] + segment.pos - windows[index][0], segment=segment)
        for index, segment in cut_to_windows(segments, windows)
    ]
