"""What the example's environment plays: every kind of sample that a trainer meets, seeded.

Each scene is a group of rollouts. Together they hold many-turn samples, a prefix that comes back
tokenised anew, rows that the engine did not report, requests without kept sets, without routing or
without both, tokens of a tool, a sample that is too long, and short ones.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from examples.train_tiny_moe.engine import Answer, Sampling, StandInEngine
from examples.train_tiny_moe.rollouts import Rollout, Turn

GROUP_SIZE: Final = 2
SHORTER_BY: Final = 4  # tokens, from one member of a group to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One group. ``holes`` are positions whose rows the engine reports as invalid."""

    name: str
    prompt_tokens: int
    sampling: Sampling
    turns: int = 1
    retokenises: bool = False  # the second prompt differs in the middle: another branch
    tool_tokens: tuple[int, ...] = ()  # completion tokens that nobody sampled
    holes: tuple[int, ...] = ()
    has_routing: bool = True
    last_turn_keeps_all: bool = False  # a turn without kept sets after one with


def scenes(*, seq_len: int) -> tuple[Scene, ...]:
    """All scenes; one is longer than ``seq_len``."""
    short = Sampling(tokens_max=14, seed=0)
    return (
        Scene(name="one-turn", prompt_tokens=11, sampling=short),
        Scene(name="two-turns", prompt_tokens=9, sampling=short, turns=2, last_turn_keeps_all=True),
        Scene(name="branches", prompt_tokens=12, sampling=short, turns=2, retokenises=True),
        Scene(
            name="keeps-all",
            prompt_tokens=7,
            sampling=replace(short, top_k=0, top_p=1.0, temperature=0.75),
        ),
        Scene(name="holes", prompt_tokens=10, sampling=short, holes=(3, 4, 12, 16)),
        Scene(name="tools", prompt_tokens=5, sampling=short, tool_tokens=(3, 4, 5)),
        Scene(name="greedy", prompt_tokens=6, sampling=replace(short, top_k=1, tokens_max=8)),
        Scene(name="no-routing", prompt_tokens=8, sampling=short, has_routing=False),
        Scene(
            name="no-rows",
            prompt_tokens=8,
            sampling=replace(short, top_k=0, top_p=1.0),
            has_routing=False,
        ),
        Scene(
            name="too-long",
            prompt_tokens=seq_len - 10,
            sampling=replace(short, top_k=50, top_p=0.95, tokens_max=18),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A rollout before it is played. ``key`` seeds its prompt, its sampling and its reward."""

    rollout_id: str
    group_id: str
    scene: Scene
    member: int
    key: int


def planned(*, seq_len: int, seed: int, step: int) -> list[Planned]:
    """The rollouts of one step. Their names hold the step, so that no two steps share one."""
    return [
        Planned(
            rollout_id=f"s{step}.{scene.name}.r{member}",
            group_id=f"s{step}.{scene.name}",
            scene=scene,
            member=member,
            key=((seed * 1000 + step) * 100 + number) * GROUP_SIZE + member,
        )
        for number, scene in enumerate(scenes(seq_len=seq_len))
        for member in range(GROUP_SIZE)
    ]


def play(engine: StandInEngine, plan: Planned, *, vocab_size: int) -> Rollout:
    """All turns of one rollout. Equal weights and plans give equal rollouts."""
    rng = random.Random(plan.key)
    reward = rng.choice((-1.0, 1.0)) * (plan.member + 1) / 4  # no two of a group equal
    return Rollout(
        rollout_id=plan.rollout_id,
        group_id=plan.group_id,
        reward=reward,
        turns=tuple(_turns(engine, plan, rng, vocab_size)),
    )


def _turns(
    engine: StandInEngine, plan: Planned, rng: random.Random, vocab_size: int
) -> Iterator[Turn]:
    scene = plan.scene
    prompt = [rng.randrange(vocab_size) for _ in range(scene.prompt_tokens)]
    # Members of different length: with advantages that add up to 0 in a group the loss would be
    # what is left of terms that cancel.
    tokens_max = scene.sampling.tokens_max - SHORTER_BY * plan.member
    for number in range(scene.turns):
        sampling = replace(scene.sampling, seed=rng.randrange(1 << 30), tokens_max=tokens_max)
        if scene.last_turn_keeps_all and number == scene.turns - 1:
            sampling = replace(sampling, top_k=0, top_p=1.0)
        answer = engine.answer(prompt, sampling)
        turn = _turn(scene, f"{plan.rollout_id}.t{number}", prompt, sampling, answer)
        yield turn
        prompt = [*turn.token_ids, *(rng.randrange(vocab_size) for _ in range(3))]
        if scene.retokenises:
            prompt[scene.prompt_tokens + 4] = (prompt[scene.prompt_tokens + 4] + 1) % vocab_size


def _turn(
    scene: Scene, request_id: str, prompt: list[int], sampling: Sampling, answer: Answer
) -> Turn:
    tokens = range(len(answer.completion_ids))
    experts_NAK = answer.experts_NAK
    experts_NAK[list(scene.holes)] = 0  # every expert the same: what an engine leaves unwritten
    kept_C, scores_C = answer.kept_C, answer.scores_C
    if kept_C is not None and scores_C is not None:
        kept_C = [[] if index in scene.tool_tokens else kept_C[index] for index in tokens]
        scores_C = [[] if index in scene.tool_tokens else scores_C[index] for index in tokens]
    return Turn(
        request_id=request_id,
        prompt_ids=prompt,
        completion_ids=answer.completion_ids,
        logprobs_C=answer.logprobs_C,
        sampled_C=[index not in scene.tool_tokens for index in tokens],
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        experts_NAK=experts_NAK if scene.has_routing else None,
        kept_C=kept_C,
        scores_C=scores_C,
    )
