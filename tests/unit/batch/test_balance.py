"""Balance: equal counts, like costs, deterministic."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.batch.balance import CostWeights, balance
from sideband.batch.first_fit import first_fit
from sideband.errors import InvalidInput

DUMMY = -1


def spread(costs: list[int], dp_size: int) -> list[list[int]]:
    return balance(costs, dp_size=dp_size, cost=float, dummy=lambda: DUMMY)


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 9))
def test_every_item_is_handed_out_once_in_equal_counts(costs: list[int], dp_size: int) -> None:
    lists = spread(costs, dp_size)
    assert [len(rank) for rank in lists] == [max(1, -(-len(costs) // dp_size))] * dp_size
    dealt = [item for rank in lists for item in rank]
    assert sorted(item for item in dealt if item != DUMMY) == sorted(costs)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 9))
def test_totals_differ_by_no_more_than_the_widest_round(costs: list[int], dp_size: int) -> None:
    lists = [[max(item, 0) for item in rank] for rank in spread(costs, dp_size)]
    rounds = list(zip(*lists, strict=True))
    for earlier, later in pairwise(rounds):
        assert min(earlier) >= max(later)
    totals = [sum(rank) for rank in lists]
    assert max(totals) - min(totals) <= max(max(row) - min(row) for row in rounds)


def test_dummies_come_last() -> None:
    assert spread([5, 3, 4], 2) == [[5, DUMMY], [4, 3]]


def test_cost_grows_with_the_square_of_each_sequence_and_the_length_of_the_row() -> None:
    weights = CostWeights(per_token=2.0, per_token_pair=0.5)
    assert weights.of_row(12, [5, 4]) == 2.0 * 12 + 0.5 * (25 + 16)


@pytest.mark.parametrize("weights", [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_cost_weights_must_be_positive(weights: tuple[float, float]) -> None:
    with pytest.raises(InvalidInput, match="cost_weights"):
        CostWeights(per_token=weights[0], per_token_pair=weights[1])


def test_no_ranks_is_refused() -> None:
    with pytest.raises(InvalidInput, match="dp_size"):
        spread([1], 0)


@given(st.lists(st.integers(0, 20), max_size=80), st.integers(20, 50))
def test_first_fit_equals_the_linear_scan(sizes: list[int], capacity: int) -> None:
    expected: list[list[int]] = []
    for index, size in enumerate(sizes):
        fits = [b for b in expected if sum(sizes[i] for i in b) + size <= capacity]
        if fits:
            fits[0].append(index)
        else:
            expected.append([index])
    assert first_fit(sizes, capacity=capacity) == expected
