"""Cut a packed row into what each context-parallel rank gets.

Contiguous: R equal parts of the row. Zigzag: each padded sequence in 2R equal parts, of which rank
r takes parts r and 2R-1-r, sequence after sequence, as Megatron and Transformer Engine do. Every
token travels to exactly one rank, plus the one token after each piece where the sequence goes on:
labels and masks of the piece's last row are about that token (all that is about what was sampled).

Legend: L tokens of the packed row, E tokens of a chunk with its edge tokens.

Errors: InvalidInput for spans that do not tile the row or that the layout cannot divide.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sideband.batch.columns import Runs
from sideband.batch.types import Chunk, Layout, MicroBatch, Piece, SequenceSpan
from sideband.errors import InvalidInput
from sideband.fields import FIELDS
from sideband.segments import AnySegment, by_field, clip

Window = tuple[int, int]  # positions [start, stop)
Value = TypeVar("Value", np.bool_, np.float32, np.int32)


def check_spans(spans: Sequence[SequenceSpan], *, row_tokens: int) -> None:
    """Raise InvalidInput unless the spans tile [0, row_tokens) with non-empty, sane sequences."""
    reached = 0
    for index, span in enumerate(spans):
        if span.start != reached or span.stop <= span.start:
            raise InvalidInput(f"spans[{index}]", span, f"must start at {reached}, not be empty")
        if not 0 <= span.length <= span.stop - span.start:
            raise InvalidInput(f"spans[{index}].length", span.length, "must fit its positions")
        reached = span.stop
    if reached != row_tokens or not spans:
        raise InvalidInput("spans", reached, f"must end at the row's end, {row_tokens}")


def pieces(
    spans: Sequence[SequenceSpan], *, row_tokens: int, cp_rank: int, cp_size: int, layout: Layout
) -> tuple[Piece, ...]:
    """The pieces of one CP rank, ascending and disjoint: 1/R of the row's tokens in all.

    Pieces of one sequence that touch are one piece (zigzag's rank R-1, and R = 1); pieces of
    different sequences stay apart. Raises InvalidInput when the row cannot be divided.
    """
    if not 0 <= cp_rank < cp_size:
        raise InvalidInput("cp_rank", cp_rank, f"must lie in [0, {cp_size})")
    check_spans(spans, row_tokens=row_tokens)
    if layout == "contiguous":
        part = _part(row_tokens, cp_size)
        start, stop = cp_rank * part, (cp_rank + 1) * part
        # The last span that starts before the cut is the one a cut can lie in.
        span = spans[bisect_left(spans, stop, key=attrgetter("start")) - 1]
        return (Piece(start=start, stop=stop, has_edge=_has_edge(span, stop)),)
    return tuple(_zigzag(spans, cp_rank=cp_rank, cp_size=cp_size))


def _zigzag(spans: Sequence[SequenceSpan], *, cp_rank: int, cp_size: int) -> Iterator[Piece]:
    for span in spans:
        part = _part(span.stop - span.start, 2 * cp_size)
        early = span.start + cp_rank * part
        late = span.start + (2 * cp_size - 1 - cp_rank) * part
        ranges = (
            [(early, late + part)]
            if early + part == late
            else [
                (early, early + part),
                (late, late + part),
            ]
        )
        for start, stop in ranges:
            yield Piece(start=start, stop=stop, has_edge=_has_edge(span, stop))


def _part(tokens: int, parts: int) -> int:
    if tokens % parts:
        raise InvalidInput("tokens", tokens, f"must be a multiple of {parts} to be cut")
    return tokens // parts


def _has_edge(span: SequenceSpan, stop: int) -> bool:
    return span.start < stop < span.start + span.length


def positions_of(parts: Sequence[Piece], *, edges: bool) -> NDArray[np.int64]:
    """The packed positions of all pieces in order; with ``edges`` each is followed by its edge."""
    starts = np.array([piece.start for piece in parts], np.int64)
    stops = np.array([piece.stop + (edges and piece.has_edge) for piece in parts], np.int64)
    counts = stops - starts
    offsets = np.cumsum(counts) - counts
    return np.repeat(starts - offsets, counts) + np.arange(counts.sum())


def cut_chunk(micro_batch: MicroBatch, *, cp_rank: int, cp_size: int, layout: Layout) -> Chunk:
    """What travels to CP rank ``cp_rank``; routing cut to its pieces, masks to pieces plus edges.

    Raises InvalidInput as ``pieces`` does.
    """
    parts = pieces(
        micro_batch.spans,
        row_tokens=len(micro_batch),
        cp_rank=cp_rank,
        cp_size=cp_size,
        layout=layout,
    )
    return _cut(micro_batch, [parts])[0]


def cut_chunks(micro_batch: MicroBatch, *, cp_size: int, layout: Layout) -> list[Chunk]:
    """What travels to each CP rank: ``cut_chunk`` for all of them, in one pass over the segments.

    Raises InvalidInput as ``pieces`` does.
    """
    return _cut(micro_batch, pieces_of_ranks(micro_batch, cp_size=cp_size, layout=layout))


def pieces_of_ranks(
    micro_batch: MicroBatch, *, cp_size: int, layout: Layout
) -> list[tuple[Piece, ...]]:
    """The pieces of each CP rank. Raises InvalidInput as ``pieces`` does."""
    return [
        pieces(
            micro_batch.spans,
            row_tokens=len(micro_batch),
            cp_rank=cp_rank,
            cp_size=cp_size,
            layout=layout,
        )
        for cp_rank in range(cp_size)
    ]


def _cut(micro_batch: MicroBatch, parts_R: Sequence[tuple[Piece, ...]]) -> list[Chunk]:
    segments_R = _segments_of(micro_batch.segments, parts_R)
    return [
        _chunk(micro_batch, parts, tuple(segments))
        for parts, segments in zip(parts_R, segments_R, strict=True)
    ]


def _chunk(
    micro_batch: MicroBatch, parts: tuple[Piece, ...], segments: tuple[AnySegment, ...]
) -> Chunk:
    windows = [(piece.start, piece.stop + piece.has_edge) for piece in parts]
    versions = micro_batch.weight_versions
    return Chunk(
        row_tokens=len(micro_batch),
        pieces=parts,
        token_ids_E=_rows_in(micro_batch.token_ids_L, windows),
        loss_mask_E=_rows_in(micro_batch.loss_mask_L, windows),
        logprobs_E=_rows_in(micro_batch.logprobs_L, windows),
        advantages=_runs_in(micro_batch.advantages, windows),
        temperatures=_runs_in(micro_batch.temperatures, windows),
        weight_versions=None if versions is None else _runs_in(versions, windows),
        spans=micro_batch.spans,
        segments=segments,
        form=micro_batch.form,
    )


def _rows_in(column_L: NDArray[Value], windows: Sequence[Window]) -> NDArray[Value]:
    """The column's rows of each window; a view when there is one window."""
    if len(windows) == 1:
        start, stop = windows[0]
        return column_L[start:stop]
    return np.concatenate([column_L[start:stop] for start, stop in windows])


def _runs_in(column: Runs, windows: Sequence[Window]) -> Runs:
    bounds = np.array(windows, np.int64)
    return column.windows(bounds[:, 0], bounds[:, 1])


def _segments_of(
    segments: Sequence[AnySegment], parts_R: Sequence[Sequence[Piece]]
) -> list[list[AnySegment]]:
    """Each rank's segments: field by field, each by position."""
    owned = sorted(
        ((piece, rank) for rank, parts in enumerate(parts_R) for piece in parts),
        key=lambda one: one[0].start,
    )
    rows = [(piece.start, piece.stop) for piece, _ in owned]
    with_edges = [(piece.start, piece.stop + piece.has_edge) for piece, _ in owned]
    found: list[list[AnySegment]] = [[] for _ in parts_R]
    for field in FIELDS.values():
        windows = rows if field.about == "input" else with_edges
        for index, segment in cut_to_windows(by_field(segments, field.name), windows):
            found[owned[index][1]].append(segment)
    return found


def cut_to_windows(
    segments: Iterable[AnySegment], windows: Sequence[Window]
) -> Iterator[tuple[int, AnySegment]]:
    """The rows of ``segments`` inside each window, with the window's index.

    Segments are of one field and disjoint, in any order; the starts of windows ascend, and so do
    their stops (an edge may lie in two). Costs segments × log(windows) plus the result: a zigzag
    row has thousands of windows.
    """
    stops = [stop for _, stop in windows]
    for segment in sorted(segments, key=attrgetter("pos")):
        index = bisect_right(stops, segment.pos)
        while index < len(windows) and windows[index][0] < segment.stop:
            start, stop = windows[index]
            clipped = clip(segment, start=start, stop=stop)
            assert clipped is not None, "the window begins before the segment's end, and ends after"
            yield index, clipped
            index += 1
