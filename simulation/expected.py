"""What must come out, computed from plan and truth alone: no engine, no file, no service.

Branches follow from the plan (a re-tokenised turn begins one), so that nothing here shares code
with what is checked.

Legend: P prompt, C completion, T tokens of a sample.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sideband.masks.rows import MaskRows, ScoreRows
from sideband.routing.rows import RowArray
from simulation.plan import RolloutPlan, next_prompt
from simulation.truth import Sampling, Truth, mix

Ragged = TypeVar("Ragged", MaskRows, ScoreRows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedTurn:
    """One request's tokens. ``begins_branch``: what came before is not a prefix of its prompt."""

    prompt_ids_P: NDArray[np.int32]
    completion_ids_C: NDArray[np.int32]
    begins_branch: bool

    @property
    def sequence_T(self) -> NDArray[np.int32]:
        """Prompt and completion."""
        return np.concatenate([self.prompt_ids_P, self.completion_ids_C])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedSample:
    """One trained branch by token: row t of each column is about token t.

    ``routing_NLK`` has a row for each token that was forwarded and is still there: N is T − 1, or
    T for a sample that was cut. ``masks`` has T rows, empty where nothing trains; so do the
    ``scores`` of a rollout that asked for them.
    """

    sample_id: str
    env_name: str
    token_ids_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]
    logprobs_T: NDArray[np.float32]
    advantage: np.float32
    temperature: np.float32
    routing_NLK: RowArray
    masks: MaskRows
    scores: ScoreRows | None


def expected_turns(plan: RolloutPlan, truth: Truth) -> list[ExpectedTurn]:
    """Every request of a rollout that is not aborted."""
    turns: list[ExpectedTurn] = []
    sequence_T = plan.prompt_ids
    for turn in plan.turns:
        prompt_P = next_prompt(sequence_T, turn, vocab_size=truth.model.vocab_size)
        sampling = Sampling(
            seed=mix(plan.sampling_seed), top_k=plan.top_k, tokens_max=turn.tokens_max
        )
        completion = truth.sample(prompt_P.tolist(), sampling)
        turns.append(
            ExpectedTurn(
                prompt_ids_P=prompt_P,
                completion_ids_C=np.array(completion, np.int32),
                begins_branch=not turns or turn.retokenised_tokens > 0,
            )
        )
        sequence_T = turns[-1].sequence_T
    return turns


def expected_samples(
    plans: Sequence[RolloutPlan], truth: Truth, *, seq_len: int
) -> dict[str, ExpectedSample]:
    """Every sample that must be trained on, by its id."""
    samples: dict[str, ExpectedSample] = {}
    for plan in plans:
        if plan.ending != "completed":
            continue
        advantage = _advantage(plan, plans)
        for sample in _branches(plan, truth, advantage):
            cut = _truncated(sample, truth, seq_len)
            if cut.loss_mask_T[1:].any():
                samples[cut.sample_id] = cut
    return samples


def _advantage(plan: RolloutPlan, plans: Sequence[RolloutPlan]) -> np.float32:
    """Reward minus the mean over the members that delivered; quarters, so sums are exact."""
    rewards = [
        other.reward
        for other in plans
        if other.group_id == plan.group_id and other.ending == "completed"
    ]
    return np.float32(plan.reward - fsum(rewards) / len(rewards))


def _branches(plan: RolloutPlan, truth: Truth, advantage: np.float32) -> Iterator[ExpectedSample]:
    turns = expected_turns(plan, truth)
    starts = [index for index, turn in enumerate(turns) if turn.begins_branch]
    for number, start in enumerate(starts):
        stop = starts[number + 1] if number + 1 < len(starts) else len(turns)
        tokens_T = turns[stop - 1].sequence_T
        loss_T = np.zeros(len(tokens_T), np.bool_)
        for turn in turns[start:stop]:
            first = len(turn.prompt_ids_P)
            loss_T[first : first + len(turn.completion_ids_C)] = True
        hashes = truth.hashes(tokens_T)
        masks = truth.masks_of(hashes[:-1][loss_T], top_k=plan.top_k)
        scores = truth.scores_of(hashes[:-1][loss_T], masks) if plan.asks_scores else None
        yield ExpectedSample(
            sample_id=f"{plan.rollout_id}.b{number}",
            env_name=plan.env_name,
            token_ids_T=tokens_T,
            loss_mask_T=loss_T,
            logprobs_T=np.where(loss_T, truth.logprobs(tokens_T, 0), np.float32(0)),
            advantage=advantage,
            temperature=np.float32(plan.temperature),
            routing_NLK=truth.routing_of(hashes[1:-1]),
            masks=spread(masks, loss_T),
            scores=None if scores is None else spread(scores, loss_T),
        )


def spread(rows: Ragged, where_T: NDArray[np.bool_]) -> Ragged:
    """T rows: those of ``rows`` where ``where_T`` is set, in order, and empty ones elsewhere."""
    counts_T = np.zeros(len(where_T), np.int64)
    counts_T[where_T] = np.diff(rows.starts_N)
    return type(rows)(np.concatenate([[0], np.cumsum(counts_T)]), rows.values_M)


def _truncated(sample: ExpectedSample, truth: Truth, seq_len: int) -> ExpectedSample:
    """The first ``seq_len`` tokens; the last one left was forwarded, so its row stays."""
    if len(sample.token_ids_T) <= seq_len:
        return sample
    return replace(
        sample,
        token_ids_T=sample.token_ids_T[:seq_len],
        loss_mask_T=sample.loss_mask_T[:seq_len],
        logprobs_T=sample.logprobs_T[:seq_len],
        routing_NLK=truth.routing(sample.token_ids_T, 0, seq_len),
        masks=sample.masks.slice(0, seq_len),
        scores=None if sample.scores is None else sample.scores.slice(0, seq_len),
    )
