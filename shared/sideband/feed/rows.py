"""One row of the grid on the wire: a micro batch, or the chunk of it that one rank gets.

Both have the same columns (docs/feed-protocol.md section 1); a micro batch is a row without
pieces. Legend: L tokens of the packed row, E tokens that travel.
"""

from dataclasses import dataclass
from typing import Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from sideband.batch.columns import Runs
from sideband.batch.types import Chunk, MicroBatch, Piece, SequenceSpan
from sideband.feed.columns import (
    F32,
    I32,
    RunsWire,
    decode_runs,
    encode_runs,
    float32,
    int32,
    pack_bits,
    to_bytes,
    unpack_bits,
)
from sideband.feed.errors import MalformedStep
from sideband.feed.limits import ROW_TOKENS_MAX
from sideband.feed.rows_segments import (
    HandlesWire,
    InlineWire,
    check_kind,
    check_places,
    decode_handles,
    decode_inline,
    encode_handles,
    encode_inline,
)
from sideband.feed.spans import SpansWire, decode_pieces, decode_spans, encode_pieces, encode_spans
from sideband.fields import FIELDS
from sideband.model import ModelShape
from sideband.segments import AnySegment, Form, InlineSegment, PayloadSegment

FORMS: Final[tuple[Form | None, ...]] = (None, "inline", "handle")


class RowsWire(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The columns of one row of the grid, in the order of the format's table."""

    row_tokens: int
    pieces: memoryview | None
    token_ids: memoryview
    loss_mask: memoryview
    logprobs: memoryview
    advantages: RunsWire
    temperatures: RunsWire
    weight_versions: RunsWire | None
    spans: SpansWire
    form: int
    handles: HandlesWire | None
    inline: list[InlineWire]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Checked columns, before they become a micro batch or a chunk."""

    row_tokens: int
    pieces: tuple[Piece, ...] | None
    token_ids_E: NDArray[np.int32]
    loss_mask_E: NDArray[np.bool_]
    logprobs_E: NDArray[np.float32]
    advantages: Runs
    temperatures: Runs
    weight_versions: Runs | None
    spans: tuple[SequenceSpan, ...]
    segments: tuple[AnySegment, ...]
    form: Form | None

    def micro_batch(self) -> MicroBatch:
        """The whole row."""
        assert self.pieces is None, "decode_rows refuses pieces in a step"
        return MicroBatch(
            token_ids_L=self.token_ids_E,
            loss_mask_L=self.loss_mask_E,
            logprobs_L=self.logprobs_E,
            advantages=self.advantages,
            temperatures=self.temperatures,
            weight_versions=self.weight_versions,
            spans=self.spans,
            segments=self.segments,
            form=self.form,
        )

    def chunk(self) -> Chunk:
        """One rank's part."""
        assert self.pieces is not None, "decode_rows demands pieces in a chunk"
        return Chunk(
            row_tokens=self.row_tokens,
            pieces=self.pieces,
            token_ids_E=self.token_ids_E,
            loss_mask_E=self.loss_mask_E,
            logprobs_E=self.logprobs_E,
            advantages=self.advantages,
            temperatures=self.temperatures,
            weight_versions=self.weight_versions,
            spans=self.spans,
            segments=self.segments,
            form=self.form,
        )


def encode_rows(
    rows: MicroBatch | Chunk, model: ModelShape | None, *, spans: SpansWire | None = None
) -> RowsWire:
    """A micro batch or a chunk as columns. Segments need a model.

    ``spans``: the row's own, where they are encoded already; all chunks of a row have the same.
    """
    assert model is not None or not rows.segments, "segments without a model"
    if isinstance(rows, Chunk):
        tokens, mask, logprobs = rows.token_ids_E, rows.loss_mask_E, rows.logprobs_E
        row_tokens, pieces = rows.row_tokens, encode_pieces(rows.pieces)
    else:
        tokens, mask, logprobs = rows.token_ids_L, rows.loss_mask_L, rows.logprobs_L
        row_tokens, pieces = len(rows), None
    handles = inline = None
    if rows.form == "handle":
        handles = encode_handles(cast("tuple[PayloadSegment, ...]", rows.segments))
    elif rows.form == "inline" and model is not None:
        inline = [encode_inline(cast("InlineSegment", s), model) for s in rows.segments]
    versions = rows.weight_versions
    return RowsWire(
        row_tokens,
        pieces,
        to_bytes(tokens, I32),
        memoryview(pack_bits(mask)),
        to_bytes(logprobs, F32),
        encode_runs(rows.advantages),
        encode_runs(rows.temperatures),
        None if versions is None else encode_runs(versions),
        encode_spans(rows.spans) if spans is None else spans,
        FORMS.index(rows.form),
        handles,
        inline or [],
    )


def decode_rows(element: str, wire: RowsWire, model: ModelShape | None, *, is_chunk: bool) -> Rows:
    """The columns, fully checked. Raises MalformedStep with ``element`` in front."""
    if not 1 <= wire.row_tokens <= ROW_TOKENS_MAX:
        raise MalformedStep(f"{element}.row_tokens", f"must lie in [1, {ROW_TOKENS_MAX}]")
    pieces = _decode_pieces(element, wire, is_chunk=is_chunk)
    count = wire.row_tokens
    if pieces is not None:
        count = sum(piece.stop - piece.start + piece.has_edge for piece in pieces)
    spans = decode_spans(f"{element}.spans", wire.spans, row_tokens=wire.row_tokens)
    tokens = int32(f"{element}.token_ids", wire.token_ids, count=count)
    if int(tokens.min()) < 0:
        raise MalformedStep(f"{element}.token_ids", "must not be negative")
    versions = wire.weight_versions
    return Rows(
        row_tokens=wire.row_tokens,
        pieces=pieces,
        token_ids_E=tokens,
        loss_mask_E=unpack_bits(f"{element}.loss_mask", wire.loss_mask, count=count),
        logprobs_E=float32(f"{element}.logprobs", wire.logprobs, count=count),
        advantages=decode_runs(
            f"{element}.advantages", wire.advantages, count=count, is_float=True
        ),
        temperatures=decode_runs(
            f"{element}.temperatures", wire.temperatures, count=count, is_float=True
        ),
        weight_versions=None
        if versions is None
        else decode_runs(f"{element}.weight_versions", versions, count=count, is_float=False),
        spans=spans,
        segments=_decode_segments(element, wire, model, spans, pieces),
        form=FORMS[wire.form],
    )


def _decode_pieces(element: str, wire: RowsWire, *, is_chunk: bool) -> tuple[Piece, ...] | None:
    if is_chunk != (wire.pieces is not None):
        rule = "a chunk has pieces" if is_chunk else "a micro batch has no pieces"
        raise MalformedStep(f"{element}.pieces", rule)
    if wire.pieces is None:
        return None
    return decode_pieces(f"{element}.pieces", wire.pieces, row_tokens=wire.row_tokens)


def _decode_segments(
    element: str,
    wire: RowsWire,
    model: ModelShape | None,
    spans: tuple[SequenceSpan, ...],
    pieces: tuple[Piece, ...] | None,
) -> tuple[AnySegment, ...]:
    """The segments of the row's form, each in its place."""
    if not 0 <= wire.form < len(FORMS):
        raise MalformedStep(f"{element}.form", "must be 0, 1 or 2")
    form = FORMS[wire.form]
    if (form == "handle") != (wire.handles is not None):
        raise MalformedStep(f"{element}.handles", "must be there exactly when the form is 2")
    if wire.inline and form != "inline":
        raise MalformedStep(f"{element}.inline", "must be empty unless the form is 1")
    segments: tuple[AnySegment, ...] = ()
    if wire.handles is not None:
        segments = decode_handles(f"{element}.handles", wire.handles)
    if (segments or wire.inline) and model is None:
        raise MalformedStep(f"{element}.form", "a step without a model has no segments")
    if model is not None:
        for kind in wire.handles.kinds if wire.handles is not None else ():
            check_kind(f"{element}.handles.kinds", kind, model)
        if wire.inline:
            segments = tuple(
                decode_inline(f"{element}.inline[{index}]", part, model)
                for index, part in enumerate(wire.inline)
            )
    _check_segments(f"{element}.segments", segments, spans, pieces)
    return segments


def _check_segments(
    element: str,
    segments: tuple[AnySegment, ...],
    spans: tuple[SequenceSpan, ...],
    pieces: tuple[Piece, ...] | None,
) -> None:
    real = [(span.start, span.start + span.length) for span in spans]
    for field in FIELDS.values():
        check_places(element, segments, field.name, real)
        if pieces is not None:
            edge = field.about == "sampled"  # rows of the token after the chunk are wanted too
            parts = [(p.start, p.stop + (edge and p.has_edge)) for p in pieces]
            check_places(element, segments, field.name, parts)
