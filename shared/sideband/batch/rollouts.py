"""From the turns of a delivered rollout to the samples that train.

Legend: T tokens of a branch, P prompt and C completion tokens of a turn.

Errors: MixedForms and InvalidInput, see ``turns``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from sideband.batch.branches import build_branches, rows_of
from sideband.batch.columns import Runs
from sideband.batch.coverage import RoutingOutcome as RoutingOutcome
from sideband.batch.coverage import check_routing as check_routing
from sideband.batch.rows import (
    NEUTRAL_ADVANTAGE,
    NEUTRAL_LOGPROB,
    NEUTRAL_TEMPERATURE,
    UNKNOWN_WEIGHT_VERSION,
)
from sideband.batch.truncation import truncate as truncate
from sideband.batch.turns import MixedForms as MixedForms
from sideband.batch.turns import RolloutLimits as RolloutLimits
from sideband.batch.turns import check_turns
from sideband.batch.types import Sample, Turn
from sideband.errors import InvalidInput
from sideband.ids import ID_BYTES_MAX, RequestId, RolloutId, SampleId
from sideband.masks.rows import MaskRows
from sideband.model import ModelShape
from sideband.segments import InlineSegment, by_field

DEFAULT_LIMITS: Final = RolloutLimits()
Value = TypeVar("Value", np.bool_, np.float32, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BranchReport:
    """The samples of a rollout, and what was missing or left out on the way.

    ``sampled_tokens`` of the samples train, ``masked_tokens`` of these have a kept set. Requests
    are named that should carry rows and do not: routing that is absent altogether, a kept set of
    a trained token whose sampling cut the vocabulary.
    """

    samples: tuple[Sample, ...]
    branches_without_loss: int
    sampled_tokens: int
    masked_tokens: int
    requests_without_routing: tuple[RequestId, ...]
    requests_without_mask: tuple[RequestId, ...]


def samples_of(
    rollout_id: RolloutId,
    turns: Sequence[Turn],
    *,
    env_name: str,
    policy_version: int,
    advantage: float,
    model: ModelShape | None,
    limits: RolloutLimits = DEFAULT_LIMITS,
) -> BranchReport:
    """One sample per branch that trains; turns in the order they were dispatched.

    Every sampled token trains in exactly one sample. ``advantage`` stands on all trained tokens of
    turns that bring none of their own. Sample ids are functions of the rollout's and the branch's
    number. Routing may have holes: see ``check_routing``. Raises MixedForms, InvalidInput.
    """
    if not np.isfinite(advantage):
        raise InvalidInput("advantage", advantage, "must be finite")
    form = check_turns(rollout_id, turns, model=model, limits=limits)
    branches = build_branches(turns, branches_max=limits.branches_max)
    if branches is None:
        raise InvalidInput("turns", len(turns), f"must form at most {limits.branches_max} branches")
    samples = []
    for number, branch in enumerate(branches):
        own = [turns[index] for index in branch.turn_indices]
        if not any(turn.sampled_C.any() for turn in own):
            continue
        segments = tuple(rows_of(branch, turns))
        samples.append(
            Sample(
                sample_id=sample_id_of(rollout_id, number),
                rollout_id=rollout_id,
                env_name=env_name,
                policy_version=policy_version,
                token_ids_T=branch.token_ids_T,
                loss_mask_T=_dense(own, lambda turn: turn.sampled_C, np.bool_(False)),
                logprobs_T=_dense(own, _logprobs, np.float32(NEUTRAL_LOGPROB)),
                advantages=_advantages(own, np.float32(advantage)),
                temperatures=_temperatures(own),
                weight_versions=_weight_versions(own),
                segments=segments,
                form=form if segments else None,
            )
        )
    return _report(samples, turns, branches_without_loss=len(branches) - len(samples))


def sample_id_of(rollout_id: RolloutId, number: int) -> SampleId:
    """``<rollout id>.b<number>``; a rollout id too long for that is shortened and hashed."""
    suffix = f".b{number}"
    if len(rollout_id) + len(suffix) > ID_BYTES_MAX:
        digest = xxhash.xxh3_64_hexdigest(rollout_id.encode())
        rollout_id = RolloutId(f"{rollout_id[: ID_BYTES_MAX // 2]}-{digest}")
    return SampleId(rollout_id + suffix)


def _dense(
    own: Sequence[Turn], values_of: Callable[[Turn], NDArray[Value]], neutral: Value
) -> NDArray[Value]:
    """[T]: each turn's completion values at its completion tokens, neutral at all others."""
    column_T = np.full(_stop(own[-1]), neutral)
    for turn in own:
        column_T[len(turn.prompt_token_ids_P) : _stop(turn)] = values_of(turn)
    return column_T


def _stop(turn: Turn) -> int:
    return len(turn.prompt_token_ids_P) + len(turn.completion_token_ids_C)


def _logprobs(turn: Turn) -> NDArray[np.float32]:
    return np.where(turn.sampled_C, turn.logprobs_C, np.float32(NEUTRAL_LOGPROB))


def _advantages(own: Sequence[Turn], advantage: np.float32) -> Runs:
    def values(turn: Turn) -> NDArray[np.float32]:
        given = advantage if turn.advantages_C is None else turn.advantages_C
        return np.where(turn.sampled_C, given, np.float32(NEUTRAL_ADVANTAGE))

    return Runs.of(_dense(own, values, np.float32(NEUTRAL_ADVANTAGE)))


def _temperatures(own: Sequence[Turn]) -> Runs:
    def values(turn: Turn) -> NDArray[np.float32]:
        temperature = np.float32(turn.temperature)
        return np.where(turn.sampled_C, temperature, np.float32(NEUTRAL_TEMPERATURE))

    return Runs.of(_dense(own, values, np.float32(NEUTRAL_TEMPERATURE)))


def _weight_versions(own: Sequence[Turn]) -> Runs | None:
    if all(turn.weight_versions_C is None for turn in own):
        return None

    def values(turn: Turn) -> NDArray[np.int32]:
        if turn.weight_versions_C is None:
            return np.full(len(turn.completion_token_ids_C), UNKNOWN_WEIGHT_VERSION, np.int32)
        return turn.weight_versions_C.expand().astype(np.int32, copy=False)

    return Runs.of(_dense(own, values, np.int32(UNKNOWN_WEIGHT_VERSION)))


def _report(
    samples: Sequence[Sample], turns: Sequence[Turn], *, branches_without_loss: int
) -> BranchReport:
    sampled_tokens = masked_tokens = 0
    without_routing: list[RequestId] = []
    without_mask: list[RequestId] = []
    for turn in turns:
        sampled, masked = int(turn.sampled_C.sum()), tokens_with_masks(turn)
        sampled_tokens += sampled
        masked_tokens += masked
        if _stop(turn) > 1 and not by_field(turn.segments, "routed_experts"):
            without_routing.append(turn.request_id)
        if turn.is_truncating and masked < sampled:
            without_mask.append(turn.request_id)
    return BranchReport(
        samples=tuple(samples),
        branches_without_loss=branches_without_loss,
        sampled_tokens=sampled_tokens,
        masked_tokens=masked_tokens,
        requests_without_routing=tuple(without_routing),
        requests_without_mask=tuple(without_mask),
    )


def tokens_with_masks(turn: Turn) -> int:
    """Sampled tokens that have a kept set; a row without ids is none."""
    first = len(turn.prompt_token_ids_P)
    covered_C = np.zeros(len(turn.completion_token_ids_C), np.bool_)
    for segment in by_field(turn.segments, "sampling_mask"):
        kept = np.ones(segment.rows, np.bool_)
        if isinstance(segment, InlineSegment) and isinstance(segment.data, MaskRows):
            kept = np.diff(segment.data.starts_N) > 0
        covered_C[segment.pos - first : segment.stop - first] |= kept
    return int((covered_C & turn.sampled_C).sum())
