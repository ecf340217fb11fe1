"""Rows of an answer by handle, read out of its payload file as the answer would carry them inline.

Legend: T tokens of the request, N = T − 1 rows, C completion tokens, A all decoder layers,
K experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sideband import ModelShape, PayloadReader, PayloadRoot, PayloadSegment, scatter_layers
from sideband.routing.rows import RowArray
from sideband.segments import by_field, coverage


class IncompleteRows(Exception):
    """Segments that leave out rows of their request."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnsweredRows:
    """One choice's rows; None for a field that it has not."""

    experts_NAK: RowArray | None
    kept_C: list[list[int]] | None
    scores_C: list[list[float]] | None


def read_rows(
    response: Mapping[str, Any], token_ids: Sequence[int], prompt_tokens: int, root: PayloadRoot
) -> AnsweredRows:
    """Of the first choice. Blocks. Raises PayloadError, IncompleteRows."""
    model = msgspec.convert(response["payload_model"], ModelShape)
    segments = msgspec.convert(response["payload_segments"]["0"], list[PayloadSegment])
    tokens_T = np.array(token_ids, np.int32)
    with PayloadReader(root, model=model) as reader:
        kept, scores = (
            _ragged(by_field(segments, field), tokens_T, prompt_tokens, reader)
            for field in ("sampling_mask", "sampling_mask_logprobs")
        )
        routing = _routing(by_field(segments, "routed_experts"), len(tokens_T) - 1, model, reader)
        return AnsweredRows(experts_NAK=routing, kept_C=kept, scores_C=scores)


def _routing(
    segments: list[PayloadSegment], rows: int, model: ModelShape, reader: PayloadReader
) -> RowArray | None:
    if not segments:
        return None
    _check(segments, 0, rows)
    out_NLK = np.empty((rows, *model.row_shape), model.row_dtype)
    for segment in segments:
        reader.read_routing(segment, out_NLK[segment.pos : segment.stop])
    return scatter_layers(out_NLK, model.layer_ids, model.num_layers)


def _ragged(
    segments: list[PayloadSegment],
    tokens_T: NDArray[np.int32],
    prompt_tokens: int,
    reader: PayloadReader,
) -> list[list[Any]] | None:
    if not segments:
        return None
    _check(segments, prompt_tokens, len(tokens_T))
    found: list[list[Any]] = []
    for segment in sorted(segments, key=lambda segment: segment.pos):
        rows = reader.read_ragged(segment, tokens_T[segment.pos : segment.stop])
        found += [rows[row].tolist() for row in range(segment.rows)]
    return found


def _check(segments: list[PayloadSegment], start: int, stop: int) -> None:
    if coverage(segments) != [(start, stop)]:
        field = segments[0].field
        raise IncompleteRows(f"{field} covers {coverage(segments)} of [{start}, {stop})")
