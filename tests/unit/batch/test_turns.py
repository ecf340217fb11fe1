"""Rollouts that cannot be true are refused, and the error names the turn and the rule."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from sideband.batch.columns import Runs
from sideband.batch.rollouts import BranchReport, MixedForms, RolloutLimits, samples_of
from sideband.batch.types import Turn
from sideband.errors import InvalidInput
from sideband.ids import RolloutId
from sideband.model import ModelShape
from sideband.segments import Form, MalformedSegment
from sideband.testing.batches import NARROW_MODEL, WIDE_MODEL, score_segment
from sideband.testing.rollouts import make_turn


def build(
    turns: Sequence[Turn],
    *,
    model: ModelShape | None = WIDE_MODEL,
    advantage: float = 1.0,
    limits: RolloutLimits | None = None,
) -> BranchReport:
    return samples_of(
        RolloutId("rollout"),
        turns,
        env_name="env",
        policy_version=0,
        advantage=advantage,
        model=model,
        limits=limits or RolloutLimits(),
    )


def refused(turns: Sequence[Turn], **settings: object) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        build(turns, **settings)  # type: ignore[arg-type]  # the settings of build
    return caught.value


GOOD = make_turn(1, [1, 2, 3], [4, 5])


def test_turns_of_both_forms_in_one_rollout_are_refused() -> None:
    inline = make_turn(2, [1, 2, 3, 4, 5, 6], [7], form="inline")
    with pytest.raises(MixedForms, match="inline and handle"):
        build([GOOD, inline])


def test_both_forms_in_one_turn_are_refused() -> None:
    inline = make_turn(1, [1, 2, 3], [4, 5], form="inline")
    with pytest.raises(MixedForms):
        build([replace(GOOD, segments=(GOOD.segments[0], inline.segments[1]))])


def test_a_turn_without_rows_has_no_form_and_mixes_with_either() -> None:
    bare = make_turn(2, [1, 2, 3, 4, 5, 6], [7], form=None)
    (sample,) = build([GOOD, bare]).samples
    assert sample.form == "handle"


@pytest.mark.parametrize(
    ("prompt", "completion", "routing"),
    [
        (range(5), [5, 6, 7], [(0, 8)]),  # P1: 5 + 3 tokens have 7 rows at most
        (range(5), [], [(0, 6)]),
        (range(6000), range(817), [(0, 13313)]),  # P10: another token count than the trainer's
    ],
)
def test_more_routing_rows_than_forwarded_tokens_are_refused(
    prompt: Sequence[int], completion: Sequence[int], routing: list[tuple[int, int]]
) -> None:
    error = refused([make_turn(1, prompt, completion, routing=routing)])
    assert error.field == "turns[0].segments[0]"
    assert "must lie in [0, " in error.rule


@pytest.mark.parametrize(
    "changes", [{"file": "v0/run/00/../../x.sbp"}, {"row": -1}, {"offset": -8}, {"dtype": "int32"}]
)
def test_a_segment_that_cannot_exist_is_refused(changes: dict[str, object]) -> None:
    bad = msgspec.structs.replace(GOOD.segments[0], **changes)  # type: ignore[type-var]  # by handle
    with pytest.raises(MalformedSegment):
        build([replace(GOOD, segments=(bad,))])


@pytest.mark.parametrize("form", ["handle", "inline"])
@pytest.mark.parametrize(
    ("masks", "missing"), [([(3, 5)], (5, 6)), ([(4, 6)], (3, 4)), ([], (3, 6))]
)
def test_logprobs_without_the_kept_set_that_they_are_about_are_refused(
    form: Form, masks: list[tuple[int, int]], missing: tuple[int, int]
) -> None:
    turn = make_turn(1, [1, 2, 3], [4, 5, 6], form=form, masks=masks)
    with_scores = replace(turn, segments=(*turn.segments, score_segment(1, 3, 6, form=form)))
    error = refused([with_scores])
    assert error.field == "turns[0].sampling_mask_logprobs"
    assert error.value == missing
    assert error.rule == "must lie where sampling_mask has rows"


@pytest.mark.parametrize("masks", [[(2, 5)], [(3, 6)], [(0, 1)]])
def test_masks_outside_the_completion_are_refused(masks: list[tuple[int, int]]) -> None:
    assert "[3, 5)" in refused([make_turn(1, [1, 2, 3], [4, 5], masks=masks)]).rule


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"logprobs_C": np.zeros(1, np.float32)}, "turns[0].logprobs"),
        ({"sampled_C": np.ones(3, np.bool_)}, "turns[0].sampled"),
        ({"weight_versions_C": Runs.of(np.zeros(3, np.int32))}, "turns[0].weight_versions"),
        ({"advantages_C": np.zeros(0, np.float32)}, "turns[0].advantages"),
        ({"logprobs_C": np.array([0, np.nan], np.float32)}, "turns[0].logprobs"),
        ({"logprobs_C": np.array([0, -np.inf], np.float32)}, "turns[0].logprobs"),
        ({"advantages_C": np.array([np.inf, 0], np.float32)}, "turns[0].advantages"),
        ({"temperature": float("nan")}, "turns[0].temperature"),
        ({"temperature": -0.5}, "turns[0].temperature"),
        ({"prompt_token_ids_P": np.array([1, -2, 3], np.int32)}, "turns[0].token_ids"),
        ({"prompt_token_ids_P": np.zeros(0, np.int32)}, "turns[0].prompt_token_ids"),
    ],
)
def test_columns_and_numbers_that_do_not_fit_are_refused(
    changes: dict[str, object], field: str
) -> None:
    bad = replace(GOOD, **changes)  # type: ignore[arg-type]  # wrong on purpose
    assert refused([bad]).field == field


def test_a_number_that_is_not_finite_is_legal_where_nothing_trains() -> None:
    turn = make_turn(1, [1], [2, 3], sampled=[False, True])
    turn.logprobs_C[0] = np.nan
    (sample,) = build([turn]).samples
    assert sample.logprobs_T[:2].tolist() == [0, 0]


@pytest.mark.parametrize("advantage", [float("nan"), float("inf")])
def test_an_advantage_that_is_not_finite_is_refused(advantage: float) -> None:
    assert refused([GOOD], advantage=advantage).field == "advantage"


@pytest.mark.parametrize("form", ["handle", "inline"])
def test_rows_of_another_model_are_refused(form: str) -> None:
    turn = make_turn(1, [1, 2], [3], form=form, model=NARROW_MODEL)  # type: ignore[arg-type]
    assert refused([turn]).field == "routed_experts"
    build([turn], model=NARROW_MODEL)


def test_masks_of_another_vocabulary_are_refused() -> None:
    other = ModelShape(num_layers=7, layer_ids=(1, 2, 5), top_k=2, id_space=300, vocab_size=5004)
    assert refused([GOOD], model=other).field == "sampling_mask"


@pytest.mark.parametrize("form", ["handle", "inline"])
def test_without_a_model_the_turns_must_agree_among_themselves(form: str) -> None:
    one = make_turn(1, [1, 2], [3], form=form)  # type: ignore[arg-type]
    other = make_turn(2, [1, 2, 3], [4], form=form, model=NARROW_MODEL)  # type: ignore[arg-type]
    assert len(build([one], model=None).samples) == 1
    assert refused([one, other], model=None).field == "routed_experts"


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        (RolloutLimits(turns_max=1), "turns"),
        (RolloutLimits(tokens_max=4), "turns[0]"),
        (RolloutLimits(segments_max=1), "turns[0].segments"),
        (RolloutLimits(branches_max=1), "turns"),
    ],
)
def test_a_rollout_beyond_a_limit_is_refused(limits: RolloutLimits, field: str) -> None:
    fork = make_turn(2, [1, 9], [3])
    assert refused([GOOD, fork], limits=limits).field == field
    assert len(build([GOOD, fork]).samples) == 2


def test_a_rollout_without_turns_is_refused() -> None:
    assert refused([]).field == "turns"
