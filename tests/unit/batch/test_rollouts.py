"""Branches against a plain model: loops over lists, nothing clever."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given

from sideband.batch.rollouts import BranchReport, samples_of
from sideband.batch.types import Sample, Turn
from sideband.ids import RolloutId, check_id
from sideband.segments import Field
from sideband.testing.batches import WIDE_MODEL, Row, rows_by_position
from sideband.testing.rollouts import make_turn, rollouts

ADVANTAGE = 2.5
NEUTRAL = (False, 0.0, 0.0, 1.0, -1)  # loss, logprob, advantage, temperature, weight version


def build(turns: Sequence[Turn]) -> BranchReport:
    return samples_of(
        RolloutId("rollout"),
        turns,
        env_name="env",
        policy_version=3,
        advantage=ADVANTAGE,
        model=WIDE_MODEL,
    )


@dataclass
class PlainBranch:
    tokens: list[int]
    columns: list[tuple[bool, float, float, float, int]]
    masks: dict[int, Row] = field(default_factory=dict)


def tokens_of(turn: Turn) -> list[int]:
    return [*turn.prompt_token_ids_P.tolist(), *turn.completion_token_ids_C.tolist()]


def shared(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def plain_branches(turns: Sequence[Turn]) -> list[PlainBranch]:
    branches: list[PlainBranch] = []
    for turn in turns:
        prompt = turn.prompt_token_ids_P.tolist()
        if len(turn.completion_token_ids_C) == 0:
            continue
        best = max([shared(b.tokens, prompt) for b in branches], default=0)
        whole = [b for b in branches if shared(b.tokens, prompt) == best == len(b.tokens)]
        if whole:
            branch = whole[0]
        else:
            branch = PlainBranch([], [])
            branches.append(branch)
        new_prompt_tokens = len(prompt) - len(branch.tokens)
        branch.tokens = tokens_of(turn)
        branch.columns += [NEUTRAL] * new_prompt_tokens + completion_columns(turn)
        branch.masks |= rows_by_position(turn.segments, "sampling_mask")
    return branches


def completion_columns(turn: Turn) -> list[tuple[bool, float, float, float, int]]:
    columns = []
    for n, is_sampled in enumerate(turn.sampled_C.tolist()):
        given_advantages = turn.advantages_C
        advantage = ADVANTAGE if given_advantages is None else float(given_advantages[n])
        versions = turn.weight_versions_C
        version = -1 if versions is None else int(versions.expand()[n])
        logprob = float(turn.logprobs_C[n])
        trained = (True, logprob, advantage, float(np.float32(turn.temperature)), version)
        columns.append(trained if is_sampled else (*NEUTRAL[:4], version))
    return columns


def plain_routing(branch: PlainBranch, turns: Sequence[Turn]) -> dict[int, Row]:
    """The first turn that shares the tokens up to and including t, and has its row, gives it."""
    rows: dict[int, Row] = {}
    written = [rows_by_position(turn.segments, "routed_experts") for turn in turns]
    for t in range(len(branch.tokens) - 1):
        for turn, of_turn in zip(turns, written, strict=True):
            if t in of_turn and tokens_of(turn)[: t + 1] == branch.tokens[: t + 1]:
                rows[t] = of_turn[t]
                break
    return rows


def assert_sample_equals(sample: Sample, branch: PlainBranch, routing: dict[int, Row]) -> None:
    assert sample.token_ids_T.tolist() == branch.tokens
    versions = sample.weight_versions
    columns = zip(
        sample.loss_mask_T.tolist(),
        sample.logprobs_T.tolist(),
        sample.advantages.expand().tolist(),
        sample.temperatures.expand().tolist(),
        [-1] * len(sample) if versions is None else versions.expand().tolist(),
        strict=True,
    )
    assert list(columns) == branch.columns
    assert rows_by_position(sample.segments, "routed_experts") == routing
    assert rows_by_position(sample.segments, "sampling_mask") == branch.masks
    assert (sample.form is None) == (not sample.segments)


@given(rollouts())
def test_branches_equal_the_plain_model(turns: list[Turn]) -> None:
    report = build(turns)
    branches = plain_branches(turns)
    trained = [(n, b) for n, b in enumerate(branches) if any(c[0] for c in b.columns)]
    assert report.branches_without_loss == len(branches) - len(trained)
    for sample, (number, branch) in zip(report.samples, trained, strict=True):
        assert sample.sample_id == f"rollout.b{number}"
        assert (sample.rollout_id, sample.env_name, sample.policy_version) == ("rollout", "env", 3)
        assert_sample_equals(sample, branch, plain_routing(branch, turns))


@given(rollouts())
def test_every_sampled_token_trains_in_exactly_one_sample(turns: list[Turn]) -> None:
    report = build(turns)
    sampled = sum(int(turn.sampled_C.sum()) for turn in turns)
    assert report.sampled_tokens == sampled
    assert sum(int(sample.loss_mask_T.sum()) for sample in report.samples) == sampled
    assert not any(sample.loss_mask_T[0] for sample in report.samples)


def rows(sample: Sample, field: Field = "routed_experts") -> list[tuple[str, int]]:
    """(serial of the writing turn, position), ascending."""
    written = sorted(rows_by_position(sample.segments, field).items())
    return [(str(row[0])[-5:-4], t) for t, row in written if isinstance(row, tuple)]


def test_the_row_of_a_turns_last_token_comes_from_the_next_turn() -> None:
    """P1, P2: rows [0, 7) and [7, 12): the absent last row of turn 1 is the first of turn 2."""
    first = make_turn(1, range(5), [5, 6, 7])
    second = make_turn(2, range(10), [10, 11, 12], routing=[(7, 12)])
    (sample,) = build([first, second]).samples
    assert rows(sample) == [("1", t) for t in range(7)] + [("2", t) for t in range(7, 12)]


def test_the_turn_that_first_ran_a_token_keeps_its_row_when_a_resume_sends_all_again() -> None:
    """P5: segments [0, 10) and [0, 16) overlap by position, nothing is appended."""
    first = make_turn(1, range(6), range(6, 11))
    second = make_turn(2, range(13), range(13, 17))
    (sample,) = build([first, second]).samples
    assert rows(sample) == [("1", t) for t in range(10)] + [("2", t) for t in range(10, 16)]


def test_a_retokenised_prefix_opens_a_branch_cut_at_the_real_shared_prefix() -> None:
    """P3: turn 2 shares 9 of 12 tokens; its branch takes 9 rows of turn 1 and its own after."""
    first = make_turn(1, range(8), range(8, 12))
    second = make_turn(2, [*range(9), 70, 71], [72, 73], routing=[(9, 12)])
    one, other = build([first, second]).samples
    assert rows(one) == [("1", t) for t in range(11)]
    assert rows(other) == [("1", t) for t in range(9)] + [("2", t) for t in range(9, 12)]
    assert other.loss_mask_T.tolist() == [False] * 11 + [True] * 2
    assert rows(other, "sampling_mask") == [("2", 11), ("2", 12)]


def test_of_two_branches_with_equal_tokens_the_older_one_is_continued() -> None:
    """Two samplings of one prompt may say the same; each trains once, and only one goes on."""
    twins = [make_turn(1, [1, 2], [3]), make_turn(2, [1, 2], [3])]
    one, other = build([*twins, make_turn(3, [1, 2, 3, 4], [5], routing=[(2, 4)])]).samples
    assert one.token_ids_T.tolist() == [1, 2, 3, 4, 5]
    assert other.token_ids_T.tolist() == [1, 2, 3]
    assert rows(other, "sampling_mask") == [("2", 2)]


def test_sub_agents_interleave_without_touching_the_main_line() -> None:
    main = [make_turn(1, [1, 2], [3]), make_turn(3, [1, 2, 3, 4], [5], routing=[(2, 4)])]
    agent = [make_turn(2, [9, 8], [7]), make_turn(4, [9, 8, 7, 6], [5], routing=[(2, 4)])]
    one, other = build([main[0], agent[0], main[1], agent[1]]).samples
    assert one.token_ids_T.tolist() == [1, 2, 3, 4, 5]
    assert rows(one) == [("1", 0), ("1", 1), ("3", 2), ("3", 3)]
    assert rows(other) == [("2", 0), ("2", 1), ("4", 2), ("4", 3)]


def test_a_turn_aborted_without_tokens_or_rows_changes_nothing() -> None:
    """P7: an empty segment list is legal, and asks for no rows of its observation tokens."""
    first = make_turn(1, [1, 2], [3])
    aborted = make_turn(2, [1, 2, 3, 4, 5, 6], [], form=None)
    (sample,) = build([first, aborted]).samples
    assert sample.token_ids_T.tolist() == [1, 2, 3]
    assert build([aborted]).samples == ()


def test_an_aborted_turn_may_still_fill_rows() -> None:
    """A forwarded prompt is a forwarded prompt; 5 + 0 tokens have 5 rows (P1)."""
    aborted = make_turn(1, range(5), [])
    again = make_turn(2, range(5), [5], routing=[])
    (sample,) = build([aborted, again]).samples
    assert rows(sample) == [("1", t) for t in range(5)]


def test_a_branch_that_trains_nothing_is_counted() -> None:
    report = build([make_turn(1, [1], [2, 3], sampled=[False, False])])
    assert (report.samples, report.branches_without_loss) == ((), 1)


def test_left_padding_is_part_of_the_tokens_and_shifts_no_row() -> None:
    """P13: three left pads are tokens like others; rows go by position from the first of them."""
    turn = make_turn(1, [0, 0, 0, 5, 6], [7, 8], routing=[(3, 6)])
    (sample,) = build([turn]).samples
    assert rows(sample) == [("1", 3), ("1", 4), ("1", 5)]


@pytest.mark.parametrize("form", ["handle", "inline"])
def test_requests_without_routing_or_mask_are_named(form: str) -> None:
    """P11, P62: absent where it must not be is loud, and says which request."""
    whole = make_turn(1, [1, 2], [3], form=form, is_truncating=True)  # type: ignore[arg-type]
    bare = make_turn(2, [1, 2, 3, 4], [5, 6], form=None, is_truncating=True)
    greedy = make_turn(4, [1, 2, 3, 4, 5, 6, 7], [8], form=None, is_truncating=False)
    report = build([whole, bare, greedy])
    assert report.requests_without_routing == ("request-2", "request-4")
    assert report.requests_without_mask == ("request-2",)
    assert report.sampled_tokens == 4


def test_an_inline_row_without_kept_ids_is_no_mask() -> None:
    """P61: counts 0, 1 and more differ; only the first means "no replay"."""
    counts = [0, 1, 2, 3]
    serial = next(s for s in range(9) if _counts(s, 2) == counts)
    turn = make_turn(serial, [1, 2], [3, 4, 5, 6], form="inline", is_truncating=True)
    report = build([turn])
    assert report.masked_tokens == 3
    assert report.requests_without_mask == (turn.request_id,)
    (sample,) = report.samples
    masks = rows_by_position(sample.segments, "sampling_mask")
    assert [len(masks[t]) // 4 for t in range(2, 6)] == counts


def _counts(serial: int, first: int) -> list[int]:
    turn = make_turn(serial, range(first), range(4), form="inline")
    masks = rows_by_position(turn.segments, "sampling_mask")
    return [len(masks[t]) // 4 for t in range(first, first + 4)]


def test_sample_ids_stay_legal_for_the_longest_rollout_ids_and_never_meet() -> None:
    turns = [make_turn(1, [1], [2]), make_turn(2, [3], [4])]
    ids = set()
    for rollout_id in ("r" * 128, "r" * 127 + "s", "r" * 125):
        report = samples_of(
            RolloutId(rollout_id), turns, env_name="", policy_version=0, advantage=0.0, model=None
        )
        ids |= {check_id("sample_id", sample.sample_id) for sample in report.samples}
    assert len(ids) == 6
