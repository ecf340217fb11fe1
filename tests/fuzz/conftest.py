"""``--fuzz-seconds N`` gives each fuzz test so long; the summary says what it tried."""

from collections.abc import Iterator

import pytest

from tests.fuzz.budget import Budget

PROPERTY = "fuzzed"
SLACK_S = 120.0  # for the last seed, and to make a failing example small


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds = config.getoption("--fuzz-seconds")
    for item in items:
        if "budget" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(seconds + SLACK_S))


@pytest.fixture
def budget(request: pytest.FixtureRequest) -> Iterator[Budget]:
    """What this test may spend."""
    option = request.config.getoption
    made = Budget(seconds=option("--fuzz-seconds"), first_seed=option("--fuzz-seed"))
    yield made
    if made.is_spent:
        request.node.user_properties.append((PROPERTY, (request.node.name, made.told)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line per test that passed."""
    for report in terminalreporter.getreports(""):
        if report.when == "teardown" and report.passed:
            for name, value in report.user_properties:
                if name == PROPERTY:
                    terminalreporter.write_line(f"inputs of {value[0]}: {value[1]}")
