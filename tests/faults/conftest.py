"""``--fault-seeds N`` runs every seeded test N times; the summary says what was injected."""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.faults.seeds import Chance

PROPERTY = "faults"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault_seed" in metafunc.fixturenames:
        count = metafunc.config.getoption("--fault-seeds")
        metafunc.parametrize("fault_seed", range(count))


@pytest.fixture
def chance(fault_seed: int, request: pytest.FixtureRequest) -> Iterator[Chance]:
    """Decides the faults of this test."""
    made = Chance(fault_seed)
    yield made
    for kind, count in made.injected.items():
        request.node.user_properties.append((PROPERTY, (kind, count)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line per kind: faults that the tests which passed have survived."""
    survived: Counter[str] = Counter()
    for report in terminalreporter.getreports(""):
        if report.when == "teardown" and report.passed:
            for name, value in report.user_properties:
                if name == PROPERTY:
                    survived[value[0]] += value[1]
    if survived:
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(survived.items()))
        terminalreporter.write_line(f"faults injected and survived: {faults}")
