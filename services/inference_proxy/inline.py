"""Inline routing arrays of an answer: where their rows lie, which count, and the P/D merge: pure.

The merge is the one of ``sideband.segments``, on arrays in the engine's own columns (all layers,
or ``routed_layer_ids``). One choice carries one array, so what is left must be one run of rows:
with a hole only the run that ends the sequence stays (decisions/0005).

Legend: N rows, L layers (columns), K expert ids per layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from services.inference_proxy.answers import Choice, MalformedAnswer
from services.inference_proxy.limits import ANSWER_BYTES_MAX
from sideband.engines.forms import (
    RoutingText,
    RoutingValue,
    decode_routing,
    routing_text,
    text_of,
)
from sideband.engines.inline import (
    InvalidInlineRouting,
    RowArray,
    routing_position,
)
from sideband.routing.rows import valid_rows
from sideband.segments import InlineSegment, merge_prefill_decode

BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InlineRows:
    """One run of rows at positions [pos, pos + rows); ``text`` is its base64 form."""

    pos: int
    rows_NLK: RowArray
    text: RoutingText

    @property
    def stop(self) -> int:
        """First position after the rows."""
        return self.pos + len(self.rows_NLK)


def colocated_rows(choice: Choice, *, prompt_tokens: int, prompt_start: int) -> InlineRows | None:
    """The rows of an answer that one engine gave alone. Raises MalformedAnswer."""
    if choice.routed_experts is None:
        return None
    rows, declared = _decode(choice.routed_experts)
    try:
        pos = routing_position(
            rows=len(rows),
            prompt_tokens=prompt_tokens,
            completion_tokens=len(choice.token_ids),
            prompt_start=prompt_start,
            declared=declared,
        )
    except InvalidInlineRouting as exc:
        raise MalformedAnswer("routed_experts", str(exc)) from exc
    return InlineRows(pos=pos, rows_NLK=rows, text=routing_text(choice.routed_experts, rows))


def decode_rows(choice: Choice, *, prompt_tokens: int) -> InlineRows | None:
    """The rows of a decode leg: they end at N − 1, wherever they begin.

    A decode engine need not obey the first position asked for, and rows below the prompt's end are
    never used; so every count that reaches back to the prompt's end is taken. Raises
    MalformedAnswer.
    """
    if choice.routed_experts is None:
        return None
    rows, declared = _decode(choice.routed_experts)
    stop = prompt_tokens + max(0, len(choice.token_ids) - 1)
    if not stop - prompt_tokens <= len(rows) <= stop:
        rule = f"{len(rows)} rows must fit [{prompt_tokens}, {stop})"
        raise MalformedAnswer("routed_experts", rule)
    if declared not in {None, stop - len(rows)}:
        rule = f"{len(rows)} rows that end at {stop} cannot start at {declared}"
        raise MalformedAnswer("routed_experts", rule)
    text = routing_text(choice.routed_experts, rows)
    return InlineRows(pos=stop - len(rows), rows_NLK=rows, text=text)


def merge_rows(
    prefill: InlineRows | None, decode: InlineRows | None, *, prompt_tokens: int
) -> InlineRows | None:
    """One run of rows from both legs, or None without any. Raises MalformedAnswer."""
    if prefill is not None and decode is not None:
        ours, theirs = prefill.rows_NLK, decode.rows_NLK
        if (ours.dtype, ours.shape[1:]) != (theirs.dtype, theirs.shape[1:]):
            rule = f"prefill sends {ours.dtype} {ours.shape[1:]}, decode {theirs.dtype} "
            raise MalformedAnswer("routed_experts", f"{rule}{theirs.shape[1:]}")
    merged = merge_prefill_decode(
        _segments(prefill), _segments(decode), prompt_tokens=prompt_tokens
    )
    run = _last_run(merged)
    if not run:
        return None
    rows = cast("RowArray", np.concatenate([segment.data for segment in run]))
    return InlineRows(pos=run[0].pos, rows_NLK=rows, text=text_of(rows))


def valid_ranges(rows: InlineRows) -> list[tuple[int, int]]:
    """Positions of rows that a trainer can use, as ascending half-open ranges.

    The proxy does not know which layers route: a column that is zero in every row is taken for a
    layer without a router (all of them: the rows are no rows). A row wrongly left out is only
    asked for once more.
    """
    if not len(rows.rows_NLK):
        return []
    routed_L = _routed(rows.rows_NLK)
    if routed_L.any() or rows.rows_NLK.shape[2] == 1:
        blocks = [
            valid_rows(block if routed_L.all() else block[:, routed_L], id_space=1 << 16)
            for block in _blocks(rows.rows_NLK)
        ]
        valid_N = np.concatenate(blocks)
    else:
        valid_N = np.zeros(len(rows.rows_NLK), np.bool_)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], valid_N.view(np.int8), [0]))))
    return [(rows.pos + int(a), rows.pos + int(b)) for a, b in edges.reshape(-1, 2)]


def _routed(rows_NLK: RowArray) -> NDArray[np.bool_]:
    """Which columns are not zero in every row."""
    routed_L = np.zeros(rows_NLK.shape[1], np.bool_)
    for block in _blocks(rows_NLK):
        routed_L |= block.any(axis=(0, 2))
        if routed_L.all():
            break
    return routed_L


def _blocks(rows_NLK: RowArray) -> Iterator[RowArray]:
    """The rows in blocks of about BLOCK_BYTES: what looks at one takes some milliseconds."""
    count = max(1, BLOCK_BYTES * len(rows_NLK) // max(1, rows_NLK.nbytes))
    for start in range(0, len(rows_NLK), count):
        yield rows_NLK[start : start + count]


def _decode(value: RoutingValue) -> tuple[RowArray, int | None]:
    try:
        return decode_routing(value, bytes_max=ANSWER_BYTES_MAX)
    except InvalidInlineRouting as exc:
        raise MalformedAnswer("routed_experts", str(exc)) from exc


def _segments(rows: InlineRows | None) -> list[InlineSegment]:
    if rows is None or not len(rows.rows_NLK):
        return []
    return [InlineSegment(field="routed_experts", pos=rows.pos, data=rows.rows_NLK)]


def _last_run(segments: Sequence[InlineSegment]) -> list[InlineSegment]:
    """The contiguous segments that end the sequence; ``segments`` ascend by position."""
    run: list[InlineSegment] = []
    for segment in reversed(segments):
        if run and segment.stop != run[0].pos:
            break
        run.insert(0, segment)
    return run
