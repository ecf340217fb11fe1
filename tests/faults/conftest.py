"""``--fault-seeds N`` runs every seeded test N times; the summary says what was injected."""

from collections.abc import Iterator

import pytest

from tests.faults.seeds import Chance
from tests.survived import note


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault_seed" in metafunc.fixturenames:
        count = metafunc.config.getoption("--fault-seeds")
        metafunc.parametrize("fault_seed", range(count))


@pytest.fixture
def chance(fault_seed: int, request: pytest.FixtureRequest) -> Iterator[Chance]:
    """Decides the faults of this test."""
    made = Chance(fault_seed)
    yield made
    note(request.node, "faults injected and survived", [fault_seed], made.injected)
