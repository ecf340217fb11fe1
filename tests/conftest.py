"""Settings of every test: hypothesis profiles. A failing example prints its seed."""

import pytest
from hypothesis import HealthCheck, settings

from tests import survived

settings.register_profile(
    "fast",
    max_examples=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", parent=settings.get_profile("fast"), max_examples=1000)
settings.load_profile("fast")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault-seeds", type=int, default=3, help="seeds of each seeded fault test (default 3)"
    )
    parser.addoption(
        "--fuzz-seconds",
        type=float,
        default=0.0,
        help="how long each fuzz test goes on (default: one seed)",
    )
    parser.addoption(
        "--fuzz-seed", type=int, default=0, help="the first seed of the fuzz tests (default 0)"
    )
    parser.addoption(
        "--crash-seeds",
        type=int,
        default=10,
        help="seeds of the live run with crashes (default 10)",
    )
    parser.addoption("--nfs-at", default="", help="command that runs one on an NFS client")
    parser.addoption("--nfs-shared", default="", help="folder that NFS clients see at their /")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the seeded tests that passed have injected and survived."""
    survived.tell(terminalreporter)
