"""Checks what engines and proxy answered, turn by turn, before anything is clipped or packed."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sideband.engines.inline import inline_segments
from sideband.fields import Field
from sideband.masks.rows import MaskRows, RaggedRows, ScoreRows
from sideband.model import ModelShape
from sideband.payload import PayloadReader
from sideband.routing.rows import RowArray
from sideband.segments import AnySegment, InlineSegment, PayloadSegment, by_field, coverage
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
            _check_sampled(checks, name, segments, wanted, truth, reader, plan)


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
            sampling_mask_logprobs=turn.get("sampling_mask_logprobs"),
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


def _check_sampled(
    checks: Checks,
    name: str,
    segments: list[AnySegment],
    wanted: ExpectedTurn,
    truth: Truth,
    reader: PayloadReader | None,
    plan: RolloutPlan,
) -> None:
    """Kept sets of all sampled tokens, and their logprobs where the rollout asked for them."""
    tokens_T, first = wanted.sequence_T, len(wanted.prompt_ids_P)
    masks = truth.masks(tokens_T, first, top_k=plan.top_k)
    scores = truth.scores(tokens_T, first, top_k=plan.top_k) if plan.asks_scores else None
    right: list[tuple[str, Field, MaskRows | ScoreRows | None]] = [
        ("turns: sampling masks", "sampling_mask", masks),
        ("turns: logprobs of kept ids", "sampling_mask_logprobs", scores),
    ]
    for title, field, rows in right:
        own = sorted(by_field(segments, field), key=lambda segment: segment.pos)
        if rows is None:
            checks.of(title).add(*([f"{name}: {field} unasked"] if own else []))
            continue
        parts = [read_ragged(segment, reader, tokens_T) for segment in own]
        covers = coverage(own) == [(first, len(tokens_T))]
        is_same = covers and concatenated(parts).equals(rows)
        checks.of(title).add(*([] if is_same else [f"{name}: {field}"]))


def concatenated(parts: list[MaskRows | ScoreRows]) -> RaggedRows[Any]:
    """Parts of one field, in order; there is at least one."""
    starts_N = [part.starts_N[1:] for part in parts]
    ends = np.cumsum([0, *(part.starts_N[-1] for part in parts)])
    moved = [starts + end for starts, end in zip(starts_N, ends, strict=False)]
    values_M = np.concatenate([part.values_M for part in parts])
    return type(parts[0])(np.concatenate([np.zeros(1, np.int64), *moved]), values_M)


def read_rows(segment: AnySegment, reader: PayloadReader | None) -> RowArray:
    """Routing rows of one segment, out of memory or out of its file."""
    if isinstance(segment, InlineSegment):
        assert isinstance(segment.data, np.ndarray), "routing rows are arrays"
        return segment.data
    assert reader is not None, "a way by handle has a reader"
    rows: RowArray = np.empty((segment.rows, *segment.shape), segment.dtype)
    reader.read_routing(segment, rows)
    return rows


def read_ragged(
    segment: AnySegment, reader: PayloadReader | None, tokens_T: NDArray[np.int32]
) -> MaskRows | ScoreRows:
    """Rows about sampled tokens of the sequence ``tokens_T``, out of memory or out of a file."""
    if isinstance(segment, InlineSegment):
        assert isinstance(segment.data, MaskRows | ScoreRows), "kept sets and scores are CSR rows"
        return segment.data
    assert reader is not None, "a way by handle has a reader"
    return reader.read_ragged(segment, tokens_T[segment.pos : segment.stop])
