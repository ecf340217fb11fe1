"""The comparison sees every single difference, and nothing where there is none."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sideband.masks.rows import MaskRows
from simulation.assembly import PER_TOKEN, IncompleteRow, RankDump, Sequence, sequences_of
from simulation.comparison import Checks, following, padding_differences, sample_differences
from simulation.expected import ExpectedSample, expected_samples
from simulation.plan import Scenario, make_plan
from simulation.truth import Truth
from tests.simulation.models import TINY

SCENARIO = Scenario(seed=1, groups=1, vocab_size=TINY.vocab_size, prompt_tokens=(5, 9))


@pytest.fixture(name="expected")
def _expected() -> ExpectedSample:
    samples = expected_samples(make_plan(SCENARIO), Truth(TINY, seed=0), seq_len=40)
    return max(samples.values(), key=lambda sample: len(sample.token_ids_T))


def right(expected: ExpectedSample) -> Sequence:
    """The sequence as ranks must get it."""
    tokens, rows = len(expected.token_ids_T), len(expected.routing_NLK)
    loss_T = following(expected.loss_mask_T, np.bool_(False))
    routing = np.zeros((tokens, *TINY.row_shape), TINY.row_dtype)
    routing[:rows] = expected.routing_NLK
    counts = following(np.diff(expected.masks.starts_N), np.int64(0))
    return Sequence(
        sample_id=expected.sample_id,
        env_name=expected.env_name,
        policy_version=0,
        columns={
            "input_ids": expected.token_ids_T.copy(),
            "labels": following(expected.token_ids_T, np.int32(-100)),
            "loss_mask": loss_T,
            "advantages": np.where(loss_T, expected.advantage, np.float32(0)),
            "logprobs": following(expected.logprobs_T, np.float32(0)),
            "temperatures": np.full(tokens, expected.temperature),
            "position_ids": np.arange(tokens, dtype=np.int32),
            "routing_valid": np.arange(tokens) < rows,
        },
        routing=routing,
        masks=MaskRows(np.concatenate([[0], np.cumsum(counts)]), expected.masks.ids_M),
        weight_versions_T=np.where(loss_T, np.int32(0), np.int32(-1)),
    )


def test_the_right_sequence_has_no_difference(expected: ExpectedSample) -> None:
    assert sample_differences(right(expected), expected) == []


@pytest.mark.parametrize("column", PER_TOKEN)
def test_one_changed_value_of_any_column_is_seen(expected: ExpectedSample, column: str) -> None:
    found = right(expected)
    place = int(np.flatnonzero(found.columns["loss_mask"])[0])
    values: Any = found.columns[column]
    values[place] = ~values[place] if values.dtype == np.bool_ else values[place] + 1
    assert sample_differences(found, expected) == [f"{expected.sample_id}: {column}"]


def test_one_changed_expert_id_is_seen(expected: ExpectedSample) -> None:
    found = right(expected)
    assert found.routing is not None
    found.routing[3, 1, 2] ^= 1
    assert sample_differences(found, expected) == [f"{expected.sample_id}: routed_experts"]


def test_rows_beyond_the_last_forwarded_token_are_seen(expected: ExpectedSample) -> None:
    whole = replace(expected, routing_NLK=expected.routing_NLK[:-1])
    assert f"{expected.sample_id}: routed_experts" in sample_differences(right(expected), whole)


def test_missing_rows_another_length_and_another_environment_are_seen(
    expected: ExpectedSample,
) -> None:
    found = right(expected)
    assert sample_differences(replace(found, routing=None), expected)
    assert sample_differences(replace(found, env_name="other"), expected)
    short = {name: values[:-1] for name, values in found.columns.items()}
    assert sample_differences(replace(found, columns=short), expected)


def test_one_changed_kept_id_is_seen(expected: ExpectedSample) -> None:
    found = right(expected)
    ids = found.masks.ids_M.copy()
    ids[0] += 1
    changed = replace(found, masks=MaskRows(found.masks.starts_N, ids))
    assert sample_differences(changed, expected) == [f"{expected.sample_id}: sampling mask"]


def test_weight_versions_lie_between_dispatch_and_the_last_update(
    expected: ExpectedSample,
) -> None:
    found = right(expected)
    assert found.weight_versions_T is not None
    sampled = found.weight_versions_T >= 0
    named = [f"{expected.sample_id}: weight_versions"]
    later = replace(found, weight_versions_T=np.where(sampled, np.int32(2), np.int32(-1)))
    assert sample_differences(later, expected) == named
    assert sample_differences(later, expected, weight_version_max=2) == []
    after_dispatch = replace(later, policy_version=2)
    assert sample_differences(after_dispatch, expected, weight_version_max=2) == []
    older = replace(after_dispatch, weight_versions_T=found.weight_versions_T)
    assert sample_differences(older, expected, weight_version_max=2) == named
    everywhere = replace(found, weight_versions_T=np.zeros_like(found.weight_versions_T))
    assert sample_differences(everywhere, expected) == named
    missing = [f"{expected.sample_id}: weight_versions are missing"]
    assert sample_differences(replace(found, weight_versions_T=None), expected) == missing
    dispatched = replace(later, policy_version=3)
    assert f"{expected.sample_id}: policy_version" in sample_differences(dispatched, expected)


def test_a_pad_that_trains_is_seen(expected: ExpectedSample) -> None:
    found = right(expected)
    empty = {name: values[:0] for name, values in found.columns.items()}
    assert padding_differences(replace(found, columns=empty)) == []
    assert len(padding_differences(found)) == 5


def test_checks_are_good_only_when_something_was_compared() -> None:
    checks = Checks()
    assert not checks.is_good
    check = checks.of("a")
    assert not checks.is_good
    check.add()
    assert checks.is_good
    check.add(*[f"finding {n}" for n in range(50)])
    assert not checks.is_good
    assert check.different == 1
    assert len(check.findings) == 20


def chunk(cp_rank: int, positions: list[int], boundaries: list[int]) -> RankDump:
    rows = len(positions)
    arrays: dict[str, Any] = {name: np.array([positions]) for name in PER_TOKEN}
    arrays |= {
        "packed_positions": np.array(positions),
        "cu_seqlens": np.array(boundaries, np.int32),
        "sequence_lengths": np.array([3, 2], np.int32),
        "mask_starts": np.arange(rows + 1),
        "mask_ids": np.array(positions, np.int32),
    }
    plain = {
        "step": 1,
        "index": 0,
        "dp_rank": 0,
        "cp_rank": cp_rank,
        "sample_ids": ["a", "b"],
        "env_names": ["x", "y"],
        "policy_versions": [0, 0],
    }
    return RankDump(plain=plain, arrays=arrays)


def test_chunks_in_any_order_of_positions_make_one_row() -> None:
    parts = [chunk(0, [0, 3, 4, 7], [0, 4, 8]), chunk(1, [1, 2, 5, 6], [0, 4, 8])]
    (first, pad), (second, _) = sequences_of(parts)
    assert first.columns["input_ids"].tolist() == [0, 1, 2]
    assert pad.columns["input_ids"].tolist() == [3]
    assert [second.masks[row].tolist() for row in range(2)] == [[4], [5]]


@pytest.mark.parametrize(
    ("positions", "boundaries"), [([1, 2, 5, 5], [0, 4, 8]), ([1, 2, 5, 6], [0, 5, 8])]
)
def test_chunks_that_do_not_fit_together_are_refused(
    positions: list[int], boundaries: list[int]
) -> None:
    parts = [chunk(0, [0, 3, 4, 7], [0, 4, 8]), chunk(1, positions, boundaries)]
    with pytest.raises(IncompleteRow):
        list(sequences_of(parts))
