"""Checks what engines and proxy answered, turn by turn, before anything is clipped or packed."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sideband.engines.inline import inline_segments
from sideband.masks.rows import MaskRows
from sideband.model import ModelShape
from sideband.payload import PayloadReader
from sideband.routing.rows import RowArray
from sideband.segments import AnySegment, InlineSegment, PayloadSegment, coverage
from simulation.bodies import Json
from simulation.comparison import Checks, same
from simulation.expected import ExpectedTurn, expected_turns
from simulation.plan import RolloutPlan
from simulation.truth import Truth


def check_turns(
    checks: Checks,
    plans: Sequence[RolloutPlan],
    bodies: dict[str, Json],
    truth: Truth,
    reader: PayloadReader | None,
) -> None:
    """Every recorded turn against the truth. ``reader`` reads the ways by handle."""
    for plan in plans:
        if plan.ending == "aborted":
            checks.of("aborted rollouts deliver nothing").add(
                *([plan.rollout_id] if plan.rollout_id in bodies else [])
            )
            continue
        body = bodies.get(plan.rollout_id)
        expected = expected_turns(plan, truth)
        count = 0 if body is None else len(body["turns"])
        if body is None or count != len(expected):
            checks.of("turns: tokens").add(f"{plan.rollout_id}: {count} of {len(expected)} turns")
            continue
        for number, (turn, wanted) in enumerate(zip(body["turns"], expected, strict=True)):
            name = f"{plan.rollout_id}.t{number}"
            _check_tokens(checks, name, turn, wanted, truth)
            segments = segments_of(turn, wanted, truth.model)
            _check_rows(checks, name, segments, wanted, truth, reader)
            _check_masks(checks, name, segments, wanted, truth, reader, top_k=plan.top_k)


def _check_tokens(
    checks: Checks, name: str, turn: Json, wanted: ExpectedTurn, truth: Truth
) -> None:
    found = {
        "prompt": np.array(turn["prompt_token_ids"], np.int32),
        "completion": np.array(turn["completion_token_ids"], np.int32),
        "logprobs": np.array(turn["logprobs"], np.float32),
    }
    right: dict[str, Any] = {
        "prompt": wanted.prompt_ids_P,
        "completion": wanted.completion_ids_C,
        "logprobs": truth.logprobs(wanted.sequence_T, len(wanted.prompt_ids_P)),
    }
    wrong = [f"{name}: {part}" for part in found if not same(found[part], right[part])]
    checks.of("turns: tokens").add(*wrong)


def segments_of(turn: Json, wanted: ExpectedTurn, model: ModelShape) -> list[AnySegment]:
    """The rows of one turn in either form."""
    if turn.get("payload_segments") is not None:
        return list(msgspec.convert(turn["payload_segments"], list[PayloadSegment]))
    return list(
        inline_segments(
            turn.get("routed_experts"),
            turn.get("sampling_mask"),
            layer_ids=turn.get("routed_layer_ids"),
            prompt_tokens=len(wanted.prompt_ids_P),
            completion_token_ids=wanted.completion_ids_C,
            prompt_start=turn.get("routed_experts_prompt_start", 0),
            model=model,
        )
    )


def _check_rows(
    checks: Checks,
    name: str,
    segments: list[AnySegment],
    wanted: ExpectedTurn,
    truth: Truth,
    reader: PayloadReader | None,
) -> None:
    """Each row there is equals the truth, and the rows are one run that ends at N − 1."""
    own = [segment for segment in segments if segment.field == "routed_experts"]
    stop = len(wanted.sequence_T) - 1
    ranges = coverage(own)
    wrong = []
    if len(ranges) > 1 or (ranges and ranges[0][1] != stop) or (not ranges and stop):
        wrong.append(f"{name}: rows cover {ranges} of {stop}")
    for segment in own:
        found = read_rows(segment, reader)
        if not same(found, truth.routing(wanted.sequence_T, segment.pos, segment.stop)):
            wrong.append(f"{name}: rows [{segment.pos}, {segment.stop})")
    checks.of("turns: routing rows").add(*wrong)


def _check_masks(
    checks: Checks,
    name: str,
    segments: list[AnySegment],
    wanted: ExpectedTurn,
    truth: Truth,
    reader: PayloadReader | None,
    *,
    top_k: int,
) -> None:
    own = sorted(
        (segment for segment in segments if segment.field == "sampling_mask"),
        key=lambda segment: segment.pos,
    )
    tokens_T = wanted.sequence_T
    found = MaskRows.concatenate([read_masks(segment, reader, tokens_T) for segment in own])
    first = len(wanted.prompt_ids_P)
    right = truth.masks(wanted.sequence_T, first, top_k=top_k)
    covers = coverage(own) == [(first, len(wanted.sequence_T))]
    wrong = [] if covers and found.equals(right) else [f"{name}: masks"]
    checks.of("turns: sampling masks").add(*wrong)


def read_rows(segment: AnySegment, reader: PayloadReader | None) -> RowArray:
    """Routing rows of one segment, out of memory or out of its file."""
    if isinstance(segment, InlineSegment):
        assert not isinstance(segment.data, MaskRows), "routing rows are arrays"
        return segment.data
    assert reader is not None, "a way by handle has a reader"
    rows: RowArray = np.empty((segment.rows, *segment.shape), segment.dtype)
    reader.read_routing(segment, rows)
    return rows


def read_masks(
    segment: AnySegment, reader: PayloadReader | None, tokens_T: NDArray[np.int32]
) -> MaskRows:
    """Kept sets of one segment of the sequence ``tokens_T``, out of memory or out of its file."""
    if isinstance(segment, InlineSegment):
        assert isinstance(segment.data, MaskRows), "masks are CSR rows"
        return segment.data
    assert reader is not None, "a way by handle has a reader"
    return reader.read_masks(segment, tokens_T[segment.pos : segment.stop])
