"""What the environment will do: groups of multi-turn rollouts, all decided by one seed. Pure.

A plan knows nothing of engines: together with ``Truth`` it decides every token of every rollout.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Ending = Literal["completed", "failed", "aborted"]
ENVIRONMENTS: Final = ("maths", "tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Sizes and rates of a run. Rates are per rollout."""

    seed: int = 0
    groups: int = 6
    group_size: int = 4
    turns_max: int = 4
    prompt_tokens: tuple[int, int] = (24, 320)
    completion_tokens: tuple[int, int] = (1, 64)
    tool_tokens: tuple[int, int] = (2, 24)
    vocab_size: int = 131_072
    top_k: int = 20
    failed_rate: float = 0.06
    aborted_rate: float = 0.06
    retokenised_rate: float = 0.25
    greedy_rate: float = 0.1
    scores_rate: float = 0.3

    @property
    def rollouts(self) -> int:
        """Rollouts in all, whatever becomes of them."""
        return self.groups * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnPlan:
    """One request. Its prompt is what came before, changed and prolonged.

    The last ``retokenised_tokens`` tokens before it come back as others; then ``tool_ids`` follow.
    """

    tokens_max: int
    retokenised_tokens: int
    tool_ids: NDArray[np.int32]
    is_streamed: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutPlan:
    """One member of a group. ``aborts_in`` is the turn during which the client goes away."""

    rollout_id: str
    group_id: str
    group_size: int
    env_name: str
    prompt_ids: NDArray[np.int32]
    turns: tuple[TurnPlan, ...]
    sampling_seed: int
    top_k: int
    temperature: float
    reward: float
    ending: Ending
    is_binary: bool  # the form in which it is delivered
    asks_scores: bool  # logprobs of the kept ids come with them


def make_plan(scenario: Scenario) -> list[RolloutPlan]:
    """All rollouts in dispatch order: the members of a group one after the other."""
    return [plan for group in range(scenario.groups) for plan in _group(scenario, group)]


def _group(scenario: Scenario, group: int) -> Iterator[RolloutPlan]:
    rng = np.random.default_rng((scenario.seed, group))
    prompt_ids = _tokens(rng, scenario, scenario.prompt_tokens)
    env_name = ENVIRONMENTS[group % len(ENVIRONMENTS)]
    is_greedy = rng.random() < scenario.greedy_rate
    for member in range(scenario.group_size):
        own = np.random.default_rng((scenario.seed, group, member))
        drawn = own.random()
        ending: Ending = "completed"
        if drawn < scenario.failed_rate:
            ending = "failed"
        elif drawn < scenario.failed_rate + scenario.aborted_rate:
            ending = "aborted"
        yield RolloutPlan(
            rollout_id=f"g{group:03d}.r{member}",
            group_id=f"g{group:03d}",
            group_size=scenario.group_size,
            env_name=env_name,
            prompt_ids=prompt_ids,
            turns=tuple(_turns(own, scenario)),
            sampling_seed=int(own.integers(1 << 31)),
            top_k=1 if is_greedy else scenario.top_k,
            temperature=float(own.choice([0.75, 1.0])),
            reward=float(own.integers(0, 5)) / 4,
            ending=ending,
            is_binary=member % 2 == 1,
            asks_scores=bool(own.random() < scenario.scores_rate),
        )


def _turns(rng: np.random.Generator, scenario: Scenario) -> Iterator[TurnPlan]:
    count = int(rng.integers(1, scenario.turns_max + 1))
    retokenised_in = -1
    if count > 1 and rng.random() < scenario.retokenised_rate:
        retokenised_in = int(rng.integers(1, count))
    low, high = scenario.completion_tokens
    for turn in range(count):
        yield TurnPlan(
            tokens_max=int(rng.integers(low, high + 1)),
            retokenised_tokens=int(rng.integers(1, 4)) if turn == retokenised_in else 0,
            tool_ids=_tokens(rng, scenario, scenario.tool_tokens if turn else (0, 0)),
            is_streamed=bool(rng.random() < 0.2),
        )


def _tokens(
    rng: np.random.Generator, scenario: Scenario, count: tuple[int, int]
) -> NDArray[np.int32]:
    size = int(rng.integers(count[0], count[1] + 1))
    return rng.integers(3, scenario.vocab_size, size, dtype=np.int32)


def next_prompt(
    sequence_T: NDArray[np.int32], turn: TurnPlan, *, vocab_size: int
) -> NDArray[np.int32]:
    """The prompt of ``turn`` after ``sequence_T``: re-tokenised at its end, tools appended."""
    changed_T = sequence_T.copy()
    first = len(changed_T) - turn.retokenised_tokens
    changed_T[first:] = (changed_T[first:] + 1) % vocab_size  # another token in each place
    return np.concatenate([changed_T, turn.tool_ids]).astype(np.int32)
