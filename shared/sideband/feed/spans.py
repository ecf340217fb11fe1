"""Sequence boundaries and chunk pieces on the wire.

Legend: S spans, L tokens of the packed row.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from sideband.batch.types import Piece, SequenceSpan
from sideband.errors import InvalidId
from sideband.feed.columns import I32, U32, int32, to_bytes, uint32
from sideband.feed.errors import MalformedStep
from sideband.feed.limits import NAME_BYTES_MAX
from sideband.ids import SampleId, check_id


class SpansWire(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """All spans of a row as columns; an environment's name travels once."""

    sizes: memoryview
    lengths: memoryview
    policy_versions: memoryview
    env_indices: memoryview
    env_names: list[str]
    sample_ids: list[str | None]


def encode_spans(spans: Sequence[SequenceSpan]) -> SpansWire:
    """Spans that tile their row, as columns."""
    names = {name: i for i, name in enumerate(dict.fromkeys(span.env_name for span in spans))}
    return SpansWire(
        to_bytes(np.array([span.stop - span.start for span in spans], np.int64), U32),
        to_bytes(np.array([span.length for span in spans], np.int64), U32),
        to_bytes(np.array([span.policy_version for span in spans], np.int64), I32),
        to_bytes(np.array([names[span.env_name] for span in spans], np.int64), U32),
        list(names),
        [span.sample_id for span in spans],
    )


def decode_spans(element: str, wire: SpansWire, *, row_tokens: int) -> tuple[SequenceSpan, ...]:
    """Spans that tile [0, row_tokens) exactly. Raises MalformedStep."""
    count = len(wire.sample_ids)
    sizes = uint32(f"{element}.sizes", wire.sizes, count=count)
    lengths = uint32(f"{element}.lengths", wire.lengths, count=count)
    versions = int32(f"{element}.policy_versions", wire.policy_versions, count=count)
    names = uint32(f"{element}.env_indices", wire.env_indices, count=count)
    if (sizes < 1).any() or int(sizes.sum()) != row_tokens:
        raise MalformedStep(f"{element}.sizes", f"must be positive and add up to {row_tokens}")
    if (lengths > sizes).any():
        raise MalformedStep(f"{element}.lengths", "a sequence is longer than its span")
    if (names >= len(wire.env_names)).any():
        raise MalformedStep(f"{element}.env_indices", "must name an entry of env_names")
    _check_names(element, wire, lengths.tolist())
    stops = np.cumsum(sizes).tolist()
    return tuple(
        SequenceSpan(
            start=stop - size,
            stop=stop,
            length=length,
            sample_id=None if sample_id is None else SampleId(sample_id),
            env_name=wire.env_names[name],
            policy_version=version,
        )
        for size, stop, length, sample_id, name, version in zip(
            sizes.tolist(),
            stops,
            lengths.tolist(),
            wire.sample_ids,
            names.tolist(),
            versions.tolist(),
            strict=True,
        )
    )


def _check_names(element: str, wire: SpansWire, lengths: list[int]) -> None:
    for name in wire.env_names:
        if len(name.encode()) > NAME_BYTES_MAX:
            raise MalformedStep(f"{element}.env_names", f"longer than {NAME_BYTES_MAX} bytes")
    for index, (sample_id, length) in enumerate(zip(wire.sample_ids, lengths, strict=True)):
        if (sample_id is None) != (length == 0):
            rule = "must be nil exactly where the span holds no token"
            raise MalformedStep(f"{element}.sample_ids[{index}]", rule)
        if sample_id is not None:
            try:
                check_id("sample_id", sample_id)
            except InvalidId as exc:
                raise MalformedStep(f"{element}.sample_ids[{index}]", str(exc)) from exc


def encode_pieces(pieces: Sequence[Piece]) -> memoryview:
    """Pieces as u32 triples."""
    triples = [(piece.start, piece.stop, piece.has_edge) for piece in pieces]
    return to_bytes(np.array(triples, np.int64).reshape(-1, 3), U32)


def decode_pieces(element: str, data: memoryview, *, row_tokens: int) -> tuple[Piece, ...]:
    """Ascending, disjoint pieces of [0, row_tokens). Raises MalformedStep."""
    flat = uint32(element, data)
    if len(flat) == 0 or len(flat) % 3:
        raise MalformedStep(element, "must hold one or more triples")
    starts, stops, edges = flat.reshape(-1, 3).T
    if (starts >= stops).any() or (starts[1:] < stops[:-1]).any() or stops[-1] > row_tokens:
        raise MalformedStep(element, f"must ascend, disjoint, inside [0, {row_tokens})")
    if (edges > 1).any():
        raise MalformedStep(element, "has_edge must be 0 or 1")
    if (edges[stops >= row_tokens] != 0).any() or (stops[:-1] + edges[:-1] > starts[1:]).any():
        raise MalformedStep(element, "an edge token must lie between the pieces, inside the row")
    return tuple(
        Piece(start=start, stop=stop, has_edge=edge == 1)
        for start, stop, edge in zip(starts.tolist(), stops.tolist(), edges.tolist(), strict=True)
    )
