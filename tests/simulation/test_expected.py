"""What must come out agrees with the library's own way from turns to samples."""

import numpy as np
import pytest

from sideband.batch.rollouts import samples_of, truncate
from sideband.batch.types import Turn
from sideband.ids import RequestId, RolloutId
from sideband.masks.rows import MaskRows
from sideband.segments import AnySegment, InlineSegment, by_field
from simulation.expected import ExpectedTurn, expected_samples, expected_turns, spread
from simulation.plan import RolloutPlan, Scenario, make_plan, next_prompt
from simulation.truth import Truth
from tests.simulation.models import TINY

SEQ_LEN = 96
SCENARIO = Scenario(
    seed=3,
    groups=8,
    prompt_tokens=(2, 60),
    completion_tokens=(1, 20),
    vocab_size=TINY.vocab_size,
    top_k=7,
    retokenised_rate=0.6,
)


def turn_of(turn: ExpectedTurn, plan: RolloutPlan, truth: Truth, number: int) -> Turn:
    tokens_T, first = turn.sequence_T, len(turn.prompt_ids_P)
    segments: list[AnySegment] = [
        InlineSegment(
            field="sampling_mask", pos=first, data=truth.masks(tokens_T, first, top_k=plan.top_k)
        )
    ]
    if len(tokens_T) > 1:
        rows = truth.routing(tokens_T, 0, len(tokens_T) - 1)
        segments.append(InlineSegment(field="routed_experts", pos=0, data=rows))
    return Turn(
        request_id=RequestId(f"t{number}"),
        prompt_token_ids_P=turn.prompt_ids_P,
        completion_token_ids_C=turn.completion_ids_C,
        logprobs_C=truth.logprobs(tokens_T, first),
        sampled_C=np.ones(len(turn.completion_ids_C), np.bool_),
        temperature=plan.temperature,
        is_truncating=True,
        segments=tuple(segments),
    )


@pytest.mark.parametrize("seed", range(4))
def test_independent_branches_equal_those_of_the_library(seed: int) -> None:
    truth, plans = Truth(TINY, seed=seed), make_plan(SCENARIO)
    expected = expected_samples(plans, truth, seq_len=SEQ_LEN)
    found = {}
    for plan in plans:
        if plan.ending != "completed":
            continue
        turns = [
            turn_of(turn, plan, truth, number)
            for number, turn in enumerate(expected_turns(plan, truth))
        ]
        report = samples_of(
            RolloutId(plan.rollout_id),
            turns,
            env_name=plan.env_name,
            policy_version=0,
            advantage=0.0,
            model=TINY,
        )
        for sample in report.samples:
            cut = truncate(sample, SEQ_LEN)
            if cut is not None:
                found[str(cut.sample_id)] = cut
    assert found.keys() == expected.keys()
    assert len(found) > len(SCENARIO_GROUPS)  # some rollouts have several branches
    for sample_id, sample in found.items():
        right = expected[sample_id]
        assert np.array_equal(sample.token_ids_T, right.token_ids_T)
        assert np.array_equal(sample.loss_mask_T, right.loss_mask_T)
        assert np.array_equal(sample.logprobs_T, right.logprobs_T)
        for segment in by_field(sample.segments, "routed_experts"):
            assert isinstance(segment, InlineSegment)
            assert isinstance(segment.data, np.ndarray)
            assert np.array_equal(segment.data, right.routing_NLK[segment.pos : segment.stop])
        for segment in by_field(sample.segments, "sampling_mask"):
            assert isinstance(segment, InlineSegment)
            assert isinstance(segment.data, MaskRows)
            assert segment.data.equals(right.masks.slice(segment.pos, segment.stop))


SCENARIO_GROUPS = {plan.group_id for plan in make_plan(SCENARIO)}


def test_a_plan_follows_from_its_seed() -> None:
    first, second = make_plan(SCENARIO), make_plan(SCENARIO)
    assert [plan.rollout_id for plan in first] == [plan.rollout_id for plan in second]
    assert all(
        np.array_equal(a.prompt_ids, b.prompt_ids) and a.sampling_seed == b.sampling_seed
        for a, b in zip(first, second, strict=True)
    )


def test_the_default_plan_has_every_kind_of_rollout() -> None:
    plans = make_plan(Scenario(groups=15))
    assert {plan.ending for plan in plans} == {"completed", "failed", "aborted"}
    assert {plan.top_k for plan in plans} == {1, 20}
    assert any(turn.retokenised_tokens for plan in plans for turn in plan.turns)
    assert any(turn.is_streamed for plan in plans for turn in plan.turns)
    assert {plan.is_binary for plan in plans} == {True, False}


def test_a_retokenised_prompt_differs_where_it_says() -> None:
    plan = next(p for p in make_plan(SCENARIO) if any(t.retokenised_tokens for t in p.turns))
    turn = next(turn for turn in plan.turns if turn.retokenised_tokens)
    before = np.arange(10, dtype=np.int32)
    after = next_prompt(before, turn, vocab_size=TINY.vocab_size)
    kept = 10 - turn.retokenised_tokens
    assert np.array_equal(after[:kept], before[:kept])
    assert (after[kept:10] != before[kept:]).all()
    assert np.array_equal(after[10:], turn.tool_ids)


def test_spread_puts_rows_where_they_train() -> None:
    masks = MaskRows(np.array([0, 2, 3]), np.array([4, 9, 7], np.int32))
    where = np.array([False, True, False, True])
    wide = spread(masks, where)
    assert [wide[row].tolist() for row in range(4)] == [[], [4, 9], [], [7]]
