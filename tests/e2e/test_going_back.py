"""A trainer goes back while orchestrator, feed and ranks are killed with kill -9, by seed.

As many times as there are seeds of crashes: a run goes back more than once.
"""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from simulation.checker import CheckPlan, Result
from simulation.plan import Scenario
from simulation.return_check import RETURNS, Material, check_returns, make_material
from simulation.return_plan import POINTS, plan_returns
from tests.survived import note

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "crash_seed" in metafunc.fixturenames:
        count = metafunc.config.getoption("--crash-seeds")
        metafunc.parametrize("crash_seed", range(max(1, count // RETURNS)))


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    plan = CheckPlan(out=tmp_path_factory.mktemp("material"), scenario=Scenario(seed=45, groups=8))
    return asyncio.run(make_material(plan, model="sim-uint16"))


def test_what_is_trained_again_is_the_same_whoever_dies_meanwhile(
    material: Material, crash_seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    result, plan = Result(), CheckPlan(out=tmp_path)
    returner = asyncio.run(check_returns(material, plan, result, seed=crash_seed))
    wrong = [
        (check.name, check.compared, check.findings) for check in result.checks if not check.is_good
    ]
    assert not wrong, returner.killed
    plans = plan_returns(crash_seed, count=RETURNS)
    assert returner.killed == Counter(
        each for plan in plans for each in zip(POINTS, plan.dead, strict=True)
    )
    assert [record["start_id"] is not None for record in returner.records] == [
        plan.is_by_start for plan in plans
    ]
    killed = Counter({f"{part} ({point})": n for (point, part), n in returner.killed.items()})
    note(request.node, "parts killed while a trainer goes back", [crash_seed], killed)
