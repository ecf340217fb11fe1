"""kill -9 of every process of a live run, by seed: all is trained once, and exactly."""

import asyncio
from pathlib import Path

import pytest

from simulation.checker import CheckPlan, Result
from simulation.crash_check import KILLS_MAX, check_crashes
from simulation.plan import Scenario
from tests.survived import note

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
PARTS = {"proxy", "orchestrator", "feed", "engine-prefill", "engine-decode", "environment", "rank"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "crash_seed" in metafunc.fixturenames:
        count = metafunc.config.getoption("--crash-seeds")
        metafunc.parametrize("crash_seed", range(1, count + 1))


def test_every_part_may_die_at_any_time(
    crash_seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    plan = CheckPlan(out=tmp_path, scenario=Scenario(seed=crash_seed, groups=24))
    result = Result()
    killer = asyncio.run(check_crashes(plan, result, model="sim-uint16"))
    wrong = [(check.name, check.findings) for check in result.checks if not check.is_good]
    assert not wrong, killer.killed
    assert set(killer.killed) == PARTS
    assert killer.killed.total() == KILLS_MAX
    note(request.node, "parts killed with kill -9", [crash_seed], killer.killed)
