"""The same training without any of it: one process, one sequence at a time, inline arrays.

Nothing here is packed, shifted, cut or read from a file, and no code is shared with what does
that. It is slow and easy to check by eye: token t is predicted from row t − 1, over its own kept
ids, with the experts that its own engine reported.

Legend: T tokens of a sequence, A all decoder layers, K experts per layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from examples.train_tiny_moe.model import TinyMoe
from examples.train_tiny_moe.rollouts import Rollout, Turn, advantages_of
from examples.train_tiny_moe.rows import Replay, TokenRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One trained token: where it is, and how it was sampled."""

    position: int
    logprob: float
    temperature: float
    kept_ids: list[int]  # none: all


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A token sequence of a rollout, and what trains on it."""

    token_ids: list[int]
    turns: list[Turn]  # all of the rollout, in order: each may have rows of this sequence
    targets: list[Target] = field(default_factory=list)
    advantage: float = 0.0


def sequences_of(rollout: Rollout) -> list[Sequence]:
    """A turn whose prompt begins with all tokens of a sequence goes on with it; others begin one.

    A sampled token trains in the sequence that it was sampled in, and only there.
    """
    sequences: list[Sequence] = []
    for turn in rollout.turns:
        for own in sequences:
            if turn.prompt_ids[: len(own.token_ids)] == own.token_ids:
                break
        else:
            own = Sequence(token_ids=[], turns=list(rollout.turns))
            sequences.append(own)
        own.token_ids = turn.token_ids
        own.targets += targets_of(turn)
    return sequences


def targets_of(turn: Turn) -> Iterator[Target]:
    """The trained tokens of a turn, at their place in its tokens."""
    for index, is_sampled in enumerate(turn.sampled_C):
        if is_sampled:
            yield Target(
                position=len(turn.prompt_ids) + index,
                logprob=turn.logprobs_C[index],
                temperature=turn.temperature,
                kept_ids=turn.kept_C[index] if turn.kept_C is not None else [],
            )


def replay_of(sequence: Sequence, layer_ids: tuple[int, ...]) -> Replay | None:
    """For each token the row of the first turn that ran it after the same tokens.

    A row in which a layer names an expert twice is none. None when no turn reported anything.
    """
    reported = [turn for turn in sequence.turns if turn.experts_NAK is not None]
    if not reported:
        return None
    tokens = sequence.token_ids
    shape = reported[0].experts_NAK.shape[1:] if reported[0].experts_NAK is not None else ()
    experts_TAK: NDArray[np.uint8] = np.zeros((len(tokens), *shape), np.uint8)
    valid_T = np.zeros(len(tokens), np.bool_)
    for position in range(len(tokens) - 1):
        for turn in reported:
            row_AK = _row_at(turn, position, tokens)
            if row_AK is not None and _is_a_row(row_AK, layer_ids):
                experts_TAK[position], valid_T[position] = row_AK, True
                break
    experts = torch.from_numpy(experts_TAK).long()
    return Replay(
        experts_NK={layer: experts[:, layer] for layer in layer_ids},
        valid_N=torch.from_numpy(valid_T),
    )


def _row_at(turn: Turn, position: int, tokens: list[int]) -> NDArray[np.uint8] | None:
    assert turn.experts_NAK is not None
    if position >= len(turn.experts_NAK):
        return None
    if turn.token_ids[: position + 1] != tokens[: position + 1]:
        return None
    row_AK: NDArray[np.uint8] = turn.experts_NAK[position]
    return row_AK


def _is_a_row(row_AK: NDArray[np.uint8], layer_ids: tuple[int, ...]) -> bool:
    return all(len(set(row_AK[layer].tolist())) == len(row_AK[layer]) for layer in layer_ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainStep:
    """The mean loss over all trained tokens; its gradients are those of the model's parameters."""

    loss: float
    tokens: int


def plain_step(model: TinyMoe, rollouts: list[Rollout], *, seq_len: int) -> PlainStep:
    """Compute the gradients of one step. Sequences are cut after ``seq_len`` tokens.

    What comes after the cut cannot change what is before it, so only its targets are left out.
    Where no row was reported the router decides.
    """
    advantages = advantages_of(rollouts)
    loss, tokens = torch.zeros((), dtype=next(model.parameters()).dtype), 0
    for rollout in rollouts:
        for sequence in sequences_of(rollout):
            targets = [target for target in sequence.targets if target.position < seq_len]
            if targets:
                loss = loss + sequence_loss(
                    model, sequence, targets, advantages[rollout.rollout_id]
                )
            tokens += len(targets)
    mean = loss / max(1, tokens)
    mean.backward()  # type: ignore[no-untyped-call]  # torch's own
    return PlainStep(loss=float(mean.detach()), tokens=tokens)


def sequence_loss(
    model: TinyMoe, sequence: Sequence, targets: list[Target], advantage: float
) -> torch.Tensor:
    """The sum of −ratio × advantage over the targets."""
    replay = replay_of(sequence, model.config.shape.layer_ids)
    token_ids = torch.tensor(sequence.token_ids)
    logits = model(TokenRows.of_sequence(token_ids, replay)).logits_NV
    total = torch.zeros((), dtype=logits.dtype)
    for target in targets:
        token = sequence.token_ids[target.position]
        scaled = logits[target.position - 1] / target.temperature
        kept = scaled[target.kept_ids] if target.kept_ids else scaled
        logprob = scaled[token] - torch.logsumexp(kept, 0)
        total = total - torch.exp(logprob - target.logprob) * advantage
    return total
