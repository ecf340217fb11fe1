"""The seeds of a summary are told as they were."""

import pytest

from tests.survived import spans


@pytest.mark.parametrize(
    ("seeds", "told"), [([], ""), ([4], "4"), ([2, 0, 1, 7], "0-2, 7"), ([0, 2], "0, 2")]
)
def test_neighbours_are_joined(seeds: list[int], told: str) -> None:
    assert spans(seeds) == told
