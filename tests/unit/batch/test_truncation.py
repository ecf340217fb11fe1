"""Truncation cuts everything in one operation; holes drop or mark, never misalign."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.batch.advantages import group_advantages
from sideband.batch.coverage import check_routing
from sideband.batch.truncation import truncate
from sideband.batch.types import Sample
from sideband.errors import InvalidInput
from sideband.testing.batch_strategies import samples
from sideband.testing.batches import make_sample, rows_by_position

FIELDS = ("routed_experts", "sampling_mask")


@given(samples(serial=7), st.integers(1, 45))
def test_truncation_equals_slicing_every_column_and_row(sample: Sample, seq_len: int) -> None:
    cut = truncate(sample, seq_len)
    if not any(sample.loss_mask_T[1:seq_len]):
        assert cut is None
        return
    assert cut is not None
    assert (cut is sample) == (len(sample) <= seq_len)
    for name in ("token_ids_T", "loss_mask_T", "logprobs_T"):
        assert np.array_equal(getattr(cut, name), getattr(sample, name)[:seq_len])
    for name in ("advantages", "temperatures", "weight_versions"):
        column = getattr(sample, name)
        if column is not None:
            assert np.array_equal(getattr(cut, name).expand(), column.expand()[:seq_len])
    for field in FIELDS:
        rows = rows_by_position(sample.segments, field)  # type: ignore[arg-type]
        expected = {t: row for t, row in rows.items() if t < seq_len}
        assert rows_by_position(cut.segments, field) == expected  # type: ignore[arg-type]
    assert cut.form == (sample.form if cut.segments else None)


def test_a_cut_in_the_middle_of_a_segment_cuts_its_rows_and_the_last_is_real() -> None:
    """P8: 4096 rows, cut at 1000."""
    cut = truncate(make_sample(1, tokens=4097, prompt_tokens=500, form="handle"), 1000)
    assert cut is not None
    assert len(cut) == 1000
    routing, mask = cut.segments
    assert (routing.pos, routing.stop, mask.pos, mask.stop) == (0, 1000, 500, 1000)
    assert check_routing(cut, keep_rest=False)[1].holes == ()


def test_a_sample_cut_before_its_first_trained_token_is_nothing() -> None:
    sample = make_sample(1, tokens=20, prompt_tokens=10)
    assert truncate(sample, 10) is None
    assert truncate(sample, 11) is not None
    with pytest.raises(InvalidInput, match="seq_len"):
        truncate(sample, 0)


@given(samples(serial=3), st.booleans())
def test_a_hole_drops_all_routing_or_is_marked_and_masks_stay(
    sample: Sample, keep_rest: bool
) -> None:
    routing = rows_by_position(sample.segments, "routed_experts")
    missing = [t for t in range(len(sample) - 1) if t not in routing]
    kept, outcome = check_routing(sample, keep_rest=keep_rest)
    assert [t for start, stop in outcome.holes for t in range(start, stop)] == missing
    assert outcome.rows_needed == len(sample) - 1
    assert outcome.is_absent == (not routing)
    assert outcome.is_dropped == bool(routing and missing and not keep_rest)
    masks = rows_by_position(sample.segments, "sampling_mask")
    assert rows_by_position(kept.segments, "sampling_mask") == masks
    left = rows_by_position(kept.segments, "routed_experts")
    assert left == ({} if outcome.is_dropped else routing)
    assert outcome.rows_missing == len(sample) - 1 - len(left)
    assert kept.form == (sample.form if kept.segments else None)


def test_a_hole_beyond_a_later_cut_still_drops_the_routing() -> None:
    """The rule speaks of the whole sample: what is checked is what was delivered."""
    sample = make_sample(1, tokens=20, gaps=[(15, 16)])
    dropped, outcome = check_routing(sample, keep_rest=False)
    assert outcome.is_dropped
    assert outcome.holes == ((15, 16),)
    assert outcome.rows_missing == outcome.rows_needed == 19
    marked, outcome = check_routing(sample, keep_rest=True)
    assert marked is sample
    assert outcome.rows_missing == 1
    assert not rows_by_position(dropped.segments, "routed_experts")


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=32))
def test_advantages_are_rewards_minus_their_mean_whoever_came_first(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    assert advantages.dtype == np.float32
    mean = sum(rewards) / len(rewards)
    assert np.allclose(advantages, [reward - mean for reward in rewards], atol=0.1)
    assert np.array_equal(group_advantages(rewards[::-1]), advantages[::-1])


def test_a_group_of_one_or_of_equals_teaches_nothing() -> None:
    assert group_advantages([3.5]).tolist() == [0]
    assert group_advantages([0.1] * 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("rewards", [[], [1.0, float("nan")], [float("inf")]])
def test_rewards_that_are_not_finite_and_empty_groups_are_refused(rewards: list[float]) -> None:
    with pytest.raises(InvalidInput, match="rewards"):
        group_advantages(rewards)


def test_the_plain_view_of_segments_refuses_two_rows_at_one_position() -> None:
    segments = make_sample(1, tokens=4).segments
    with pytest.raises(ValueError, match="two rows"):
        rows_by_position([*segments, *segments], "routed_experts")
