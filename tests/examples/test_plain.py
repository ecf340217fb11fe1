"""Plain training's own reading of rollouts, worked out by hand: it is what the rest is held to."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from examples.train_tiny_moe.plain import replay_of, sequences_of
from examples.train_tiny_moe.rollouts import Rollout, Turn, advantages_of

pytestmark = pytest.mark.torch


def turn(prompt: list[int], completion: list[int], *, first_id: int) -> Turn:
    """Row t names experts first_id + t onwards, so that each tells whose it is."""
    rows = len(prompt) + len(completion) - 1
    ids = first_id + np.arange(rows)[:, None, None] + np.arange(2)
    return Turn(
        request_id="r",
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs_C=[-0.5] * len(completion),
        sampled_C=[True] * len(completion),
        temperature=1.0,
        top_k=2,
        top_p=1.0,
        experts_NAK=np.broadcast_to(ids, (rows, 2, 2)).astype(np.uint8),
        kept_C=[[token] for token in completion],
    )


def rollout(*turns: Turn, reward: float = 1.0, name: str = "a") -> Rollout:
    return Rollout(rollout_id=name, group_id="g", reward=reward, turns=turns)


def test_a_turn_that_repeats_all_tokens_goes_on_and_the_first_row_stays() -> None:
    first = turn([1, 2], [3, 4], first_id=10)
    second = turn([1, 2, 3, 4, 9], [5], first_id=50)
    (sequence,) = sequences_of(rollout(first, second))
    assert sequence.token_ids == [1, 2, 3, 4, 9, 5]
    assert [target.position for target in sequence.targets] == [2, 3, 5]
    assert [target.kept_ids for target in sequence.targets] == [[3], [4], [5]]
    replay = replay_of(sequence, (1,))
    assert replay is not None
    assert replay.experts_NK[1][:, 0].tolist() == [10, 11, 12, 53, 54, 0]
    assert replay.valid_N.tolist() == [True] * 5 + [False]


def test_a_turn_that_differs_begins_a_sequence_and_keeps_rows_of_what_is_shared() -> None:
    first = turn([1, 2], [3, 4], first_id=10)
    other = turn([1, 2, 8, 4], [5], first_id=50)
    one, two = sequences_of(rollout(first, other))
    assert [target.position for target in one.targets] == [2, 3]
    assert [target.position for target in two.targets] == [4]
    replay = replay_of(two, (1,))
    assert replay is not None
    assert replay.experts_NK[1][:, 0].tolist() == [10, 11, 52, 53, 0]


def test_a_row_that_names_an_expert_twice_is_none() -> None:
    only = turn([1, 2], [3, 4], first_id=10)
    assert only.experts_NAK is not None
    only.experts_NAK[1] = 0
    (sequence,) = sequences_of(rollout(only))
    replay = replay_of(sequence, (1,))
    assert replay is not None
    assert replay.valid_N.tolist() == [True, False, True, False]


def test_an_advantage_is_the_reward_less_the_groups_mean() -> None:
    only = turn([1], [2], first_id=0)
    pair = [rollout(only, reward=1.0, name="a"), rollout(only, reward=0.5, name="b")]
    assert advantages_of(pair) == {"a": 0.25, "b": -0.25}
