"""Fixtures of the real-server tests, and the table that they print at their end."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.vllm_env.model import CONFIG
from scripts.vllm_env.servers import VllmServer, running, start, why_not
from sideband.ids import RunId
from sideband.payload.root import PayloadRoot
from sideband.routing import model_shape
from tests.vllm.comparing import Comparer
from tests.vllm.report import Report

RUN = RunId("real-1")
MODEL = model_shape(CONFIG)
_REPORT = pytest.StashKey[Report]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_REPORT] = Report()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = terminalreporter.config.stash[_REPORT].lines()
    if lines:
        terminalreporter.section("real vLLM: every answer by handle against itself inline")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    """Where checks count."""
    return pytestconfig.stash[_REPORT]


@pytest.fixture(scope="session")
def payload_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A root that all servers of a session share."""
    path = tmp_path_factory.mktemp("payloads") / "store"
    PayloadRoot.create(path, RUN, fresh=True)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def comparer(payload_root: Path) -> Comparer:
    """Reads the shared root."""
    return Comparer(payload_root, MODEL)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where servers leave their logs."""
    return tmp_path_factory.mktemp("vllm-logs")


@pytest.fixture(scope="session")
def vllm_0_32(payload_root: Path, logs: Path) -> Iterator[VllmServer]:
    """One server alone: routing and masks."""
    reason = why_not("0.32")
    if reason is not None:
        pytest.skip(reason)
    with running(start("0.32", logs / "0.32.log", root=payload_root)) as (server,):
        yield server


@pytest.fixture(scope="module")
def vllm_0_30(payload_root: Path, logs: Path) -> Iterator[VllmServer]:
    """One server alone: routing."""
    reason = why_not("0.30")
    if reason is not None:
        pytest.skip(reason)
    with running(start("0.30", logs / "0.30.log", root=payload_root)) as (server,):
        yield server
