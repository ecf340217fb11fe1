"""Rollouts with their rows as an engine answers them inline: what plain training starts from.

Legend: P prompt and C completion tokens of a turn, N = P + C, A all decoder layers, K experts.
"""

from dataclasses import dataclass

from sideband.routing.rows import RowArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One request and its answer.

    ``experts_NAK`` holds N − 1 rows of every decoder layer, zeros in dense ones; None when the
    engine captured none. ``kept_C`` are the kept ids per completion token; an empty row, or no
    rows at all, keeps everything. Tokens that are not ``sampled_C`` never train.
    """

    request_id: str
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs_C: list[float]
    sampled_C: list[bool]
    temperature: float
    top_k: int
    top_p: float
    experts_NAK: RowArray | None
    kept_C: list[list[int]] | None
    scores_C: list[list[float]] | None = None  # of the kept ids

    @property
    def token_ids(self) -> list[int]:
        """Prompt and completion."""
        return [*self.prompt_ids, *self.completion_ids]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One member of a group. Its advantage is its reward less the group's mean."""

    rollout_id: str
    group_id: str
    reward: float
    turns: tuple[Turn, ...]


def advantages_of(rollouts: list[Rollout]) -> dict[str, float]:
    """By rollout id."""
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        rewards.setdefault(rollout.group_id, []).append(rollout.reward)
    means = {group: sum(values) / len(values) for group, values in rewards.items()}
    return {rollout.rollout_id: rollout.reward - means[rollout.group_id] for rollout in rollouts}
