"""Laws of the simulated model: everything follows from the prefix, and nothing else does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sideband.model import ModelShape
from sideband.routing.rows import valid_rows
from simulation.truth import Sampling, Truth, coprimes, mix, mix_array
from tests.simulation.models import SHAPES, TINY, WIDE

tokens = st.lists(st.integers(0, TINY.vocab_size - 1), min_size=1, max_size=40).map(
    lambda ids: np.array(ids, np.int32)
)


@given(tokens, tokens, st.integers(0, 5))
def test_rows_and_masks_depend_on_the_prefix_alone(
    prefix: NDArray[np.int32], tail: NDArray[np.int32], seed: int
) -> None:
    truth, whole = Truth(TINY, seed=seed), np.concatenate([prefix, tail])
    alone = truth.routing(prefix, 0, len(prefix))
    assert np.array_equal(truth.routing(whole, 0, len(prefix)), alone)
    masks = truth.masks(whole, 0, top_k=7).slice(0, len(prefix))
    assert masks.equals(truth.masks(prefix, 0, top_k=7))


@given(tokens, st.data())
def test_another_token_changes_every_later_row(ids: NDArray[np.int32], data: st.DataObject) -> None:
    truth, place = Truth(WIDE, seed=1), data.draw(st.integers(0, len(ids) - 1))
    other = ids.copy()
    other[place] = (other[place] + 1) % TINY.vocab_size
    rows, others = (truth.routing(some, 0, len(ids)) for some in (ids, other))
    differs = (rows != others).any(axis=(1, 2))
    assert not differs[:place].any()
    assert differs[place:].all()


@pytest.mark.parametrize("shape", SHAPES)
@given(tokens, st.integers(0, 3))
def test_rows_are_what_a_router_can_choose(
    shape: ModelShape, ids: NDArray[np.int32], seed: int
) -> None:
    rows = Truth(shape, seed=seed).routing(ids, 0, len(ids))
    assert rows.dtype == shape.row_dtype
    assert rows.shape == (len(ids), *shape.row_shape)
    assert int(rows.max()) < shape.id_space
    assert valid_rows(rows, id_space=shape.id_space).all()


@given(tokens, st.integers(1, 200), st.integers(0, 1 << 40), st.integers(1, 60))
def test_the_sampled_token_is_in_its_kept_set(
    prompt: NDArray[np.int32], top_k: int, seed: int, tokens_max: int
) -> None:
    truth = Truth(TINY, seed=3)
    sampling = Sampling(seed=seed, top_k=top_k, tokens_max=tokens_max)
    completion = truth.sample(prompt.tolist(), sampling)
    assert 1 <= len(completion) <= tokens_max
    assert truth.eos_token_id not in completion[:-1]
    whole = np.concatenate([prompt, np.array(completion, np.int32)])
    masks = truth.masks(whole, len(prompt), top_k=top_k)
    assert len(masks) == len(completion)
    for row, token in enumerate(completion):
        kept = masks[row]
        assert token in kept
        assert 1 <= len(kept) <= min(top_k, TINY.vocab_size)
        assert (np.diff(kept) > 0).all()


@given(tokens, st.integers(0, 1 << 30))
def test_sampling_goes_on_from_any_prefix_of_itself(prompt: NDArray[np.int32], seed: int) -> None:
    truth, sampling = Truth(TINY, seed=0), Sampling(seed=seed, top_k=9, tokens_max=12)
    completion = truth.sample(prompt.tolist(), sampling)
    rest = truth.sample([*prompt.tolist(), completion[0]], sampling)
    assert rest[: len(completion) - 1] == completion[1:]


def test_a_greedy_row_keeps_one_id_and_the_seed_does_not_matter() -> None:
    truth = Truth(WIDE, seed=5)
    sampled = {
        tuple(truth.sample([1, 2, 3], Sampling(seed=seed, top_k=1, tokens_max=20)))
        for seed in range(5)
    }
    assert len(sampled) == 1


def test_sampling_seeds_give_different_members_of_a_group() -> None:
    truth = Truth(WIDE, seed=5)
    sampled = {
        tuple(truth.sample([1, 2, 3], Sampling(seed=mix(seed), top_k=20, tokens_max=20)))
        for seed in range(20)
    }
    assert len(sampled) > 15


def test_stops_are_kept_and_least_lengths_are_reached() -> None:
    truth = Truth(TINY, seed=2)
    everything = frozenset(range(TINY.vocab_size))
    stop = Sampling(seed=1, top_k=5, tokens_max=30, tokens_min=4, stop_token_ids=everything)
    assert len(truth.sample([5], stop)) == 4
    endless = Sampling(seed=1, top_k=5, tokens_max=300, ignores_eos=True)
    assert len(truth.sample([5], endless)) == 300


def test_models_with_other_seeds_share_nothing() -> None:
    ids = np.arange(50, dtype=np.int32)
    first, second = (Truth(WIDE, seed=seed).routing(ids, 0, 50) for seed in (1, 2))
    assert not (first == second).all(axis=(1, 2)).any()


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=20))
def test_the_two_mixers_agree(values: list[int]) -> None:
    assert mix_array(np.array(values, np.uint64)).tolist() == [mix(value) for value in values]


@pytest.mark.parametrize("space", [1, 2, 3, 16, 97, 128, 512, 151_552])
def test_strides_visit_every_id(space: int) -> None:
    for stride in coprimes(space):
        assert np.gcd(int(stride), space) == 1


def test_logprobs_survive_json() -> None:
    logprobs = Truth(TINY, seed=0).logprobs(np.arange(40, dtype=np.int32), 0)
    assert logprobs.dtype == np.float32
    assert (logprobs <= 0).all()
    assert np.array_equal(logprobs, np.array(logprobs.tolist(), np.float32))
