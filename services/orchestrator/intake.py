"""From a delivered body to a ``Delivery``: what trains, what is counted, which files it names.

Pure and slow: the service calls it in a thread. It never raises for content: a rollout that breaks
a rule becomes a delivery with a refusal, so that its files are given up in the same place.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from services.orchestrator.collecting import Delivery
from services.orchestrator.errors import (
    MalformedTurn,
    MissingAdvantage,
    MissingMask,
    MixedForms,
    RolloutRefused,
)
from services.orchestrator.limits import DETAIL_CHARACTERS_MAX, REWARD_MAX
from services.orchestrator.records import DropReason, Lease, Tally
from services.orchestrator.turns import TurnRules, file_problem, read_turn
from services.orchestrator.wire import RolloutWire, encode_rollout
from sideband.batch.rollouts import MixedForms as MixedFormsInput
from sideband.batch.rollouts import check_routing, samples_of, tokens_with_masks, truncate
from sideband.batch.types import Sample, Turn
from sideband.errors import InvalidInput
from sideband.ids import RolloutId, RunId
from sideband.model import ModelShape
from sideband.segments import PayloadSegment, by_field, holes


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeRules:
    """The settings that decide what of a rollout trains."""

    run_id: RunId
    model: ModelShape | None
    has_root: bool
    seq_len: int
    keep_rows_around_holes: bool
    strict_masks: bool


def read(
    wire: RolloutWire, lease: Lease | None, rules: IntakeRules, digest: str | None = None
) -> Delivery:
    """The delivery of one body. Without an open lease only its files matter.

    ``digest`` tells it from another body of the same rollout; its own by default.
    """
    base = Delivery(
        rollout_id=RolloutId(wire.rollout_id),
        digest=digest or hashlib.sha256(encode_rollout(wire)).hexdigest(),
        files=_files_named(wire, rules.run_id, lease.policy_version if lease else None),
    )
    if lease is None:
        return base
    shared = {
        segment.file
        for turn in wire.turns
        if turn.choice_count > 1
        for segment in turn.payload_segments or ()
    }
    base = replace(base, files_shared=base.files & shared)
    if wire.status != "completed":
        return replace(base, drop=DropReason(wire.status), detail="as the client said")
    try:
        return _collected(base, wire, lease, rules)
    except RolloutRefused as refusal:
        return refused(base, refusal)


def refused(delivery: Delivery, refusal: RolloutRefused) -> Delivery:
    """The delivery with a refusal: nothing of it trains."""
    return replace(
        delivery,
        drop=DropReason.REFUSED,
        detail=refusal.detail[:DETAIL_CHARACTERS_MAX],
        refusal=refusal.code,
        samples=(),
        files_trained=frozenset(),
    )


def _files_named(wire: RolloutWire, run_id: RunId, policy_version: int | None) -> frozenset[str]:
    """Files that the body names and that may be this rollout's: others are never touched."""
    named = {segment.file for turn in wire.turns for segment in turn.payload_segments or ()}
    return frozenset(file for file in named if file_problem(file, run_id, policy_version) is None)


def _collected(base: Delivery, wire: RolloutWire, lease: Lease, rules: IntakeRules) -> Delivery:
    turn_rules = TurnRules(
        run_id=rules.run_id,
        policy_version=lease.policy_version,
        model=rules.model,
        has_root=rules.has_root,
    )
    turns = [
        read_turn(f"turns[{index}]", turn, turn_rules) for index, turn in enumerate(wire.turns)
    ]
    if not turns:
        raise MalformedTurn("turns must hold at least one turn.")
    is_waiting = _advantage_from_group(wire, turns)
    try:
        report = samples_of(
            base.rollout_id,
            turns,
            env_name=lease.env_name,
            policy_version=lease.policy_version,
            advantage=wire.advantage or 0.0,
            model=rules.model,
        )
    except MixedFormsInput as exc:
        raise MixedForms(str(exc)) from exc
    except InvalidInput as exc:
        raise MalformedTurn(str(exc)) from exc
    if rules.strict_masks and report.requests_without_mask:
        request_id = report.requests_without_mask[0]
        raise MissingMask(
            f"Request {request_id} cut the vocabulary, and a trained token has no kept set.",
            request_id=request_id,
        )
    samples, tally = _trainable(report.samples, rules)
    return replace(
        base,
        reward=wire.reward,
        is_waiting=is_waiting,
        samples=samples,
        tally=_with_turns(tally, turns),
        files_trained=frozenset(
            segment.file
            for sample in samples
            for segment in sample.segments
            if isinstance(segment, PayloadSegment)
        ),
    )


def _advantage_from_group(wire: RolloutWire, turns: Sequence[Turn]) -> bool:
    """Whether the advantage is the group's to compute. Raises MissingAdvantage."""
    for name, value in (("reward", wire.reward), ("advantage", wire.advantage)):
        if value is not None and not abs(value) <= REWARD_MAX:  # NaN too
            raise MissingAdvantage(f"{name} must be finite, at most {REWARD_MAX:g}.")
    trained = [turn for turn in turns if turn.sampled_C.any()]
    given = [turn for turn in trained if turn.advantages_C is not None]
    if wire.advantage is not None or (given and len(given) == len(trained)):
        return False
    if given:
        raise MissingAdvantage(
            "Some turns give advantages per token: give the others an advantage."
        )
    if wire.reward is None:
        raise MissingAdvantage("A completed rollout needs a reward or an advantage.")
    return True


def _trainable(samples: Sequence[Sample], rules: IntakeRules) -> tuple[tuple[Sample, ...], Tally]:
    """Each sample as it trains: rows around holes, then the cut to ``seq_len``; and the counts."""
    kept, tally = [], Tally()
    for sample in samples:
        checked, outcome = check_routing(sample, keep_rest=rules.keep_rows_around_holes)
        cut = truncate(checked, rules.seq_len)
        needed = outcome.rows_needed if rules.model is not None else 0
        tally += Tally(
            samples=int(cut is not None),
            tokens=len(cut) if cut is not None else 0,
            trained_tokens=int(cut.loss_mask_T.sum()) if cut is not None else 0,
            routing_positions=needed,
            routing_rows=max(0, needed - outcome.rows_missing),
            samples_with_holes=int(bool(outcome.holes) and needed > 0),
            samples_truncated=int(len(sample) > rules.seq_len),
            samples_untrainable=int(cut is None),
        )
        if cut is not None:
            kept.append(cut)
    return tuple(kept), tally


def _with_turns(tally: Tally, turns: Sequence[Turn]) -> Tally:
    """The tally with what is counted per turn: masks, and rows that the writer left out."""
    positions = rows = invalid = 0
    for turn in turns:
        if turn.is_truncating:
            positions += int(turn.sampled_C.sum())
            rows += tokens_with_masks(turn)
        routing = by_field(turn.segments, "routed_experts")
        if routing:
            first = min(segment.pos for segment in routing)
            tokens = len(turn.prompt_token_ids_P) + len(turn.completion_token_ids_C)
            missing = holes(routing, start=first, stop=max(first, tokens - 1))
            invalid += sum(stop - start for start, stop in missing)
    return structs.replace(tally, mask_positions=positions, mask_rows=rows, rows_invalid=invalid)
