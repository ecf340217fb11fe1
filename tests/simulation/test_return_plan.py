"""Who dies while a trainer goes back: over a few seeds everybody, at every point of both ways."""

from simulation.return_check import RETURNS
from simulation.return_plan import PARTS, POINTS, plan_returns


def test_every_part_dies_at_every_point_of_both_ways_to_go_back() -> None:
    plans = [plan for seed in range(6 // RETURNS) for plan in plan_returns(seed, count=RETURNS)]
    found = {
        (plan.is_by_start, *each) for plan in plans for each in zip(POINTS, plan.dead, strict=True)
    }
    assert found == {
        (is_by_start, point, part)
        for is_by_start in (False, True)
        for point in POINTS
        for part in PARTS
    }
