"""The small pure modules: membership, staleness, sweep plans, phases, settings."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.orchestrator.config import OrchestratorSettings
from services.orchestrator.lifecycle import Phase, Run
from services.orchestrator.membership import Candidate, StepSize, choose
from services.orchestrator.staleness import is_stale, staleness
from services.orchestrator.sweep import SweepRules, orphaned_versions, plan_version
from sideband.ids import RolloutId


def candidates(*orders: int, tokens: int = 10) -> list[Candidate]:
    return [
        Candidate(rollout_id=RolloutId(f"r{order}"), order=order, tokens=tokens) for order in orders
    ]


def test_a_step_takes_the_first_rollouts_in_order() -> None:
    chosen = choose(candidates(3, 1, 2), size=StepSize(rollouts=2), stop_before=None, is_last=False)
    assert chosen == ["r1", "r2"]


def test_a_step_that_is_not_full_waits_unless_it_is_the_last() -> None:
    size = StepSize(rollouts=3)
    assert choose(candidates(1, 2), size=size, stop_before=None, is_last=False) == []
    assert choose(candidates(1, 2), size=size, stop_before=None, is_last=True) == ["r1", "r2"]


def test_a_step_by_tokens_is_full_when_it_holds_them() -> None:
    size = StepSize(rollouts=99, tokens=25)
    assert choose(candidates(1, 2), size=size, stop_before=None, is_last=False) == []
    chosen = choose(candidates(1, 2, 3, 4), size=size, stop_before=None, is_last=False)
    assert chosen == ["r1", "r2", "r3"]


@given(st.permutations(range(8)), st.integers(0, 8))
def test_in_dispatch_order_nothing_passes_what_still_runs(order: list[int], running: int) -> None:
    """Whatever arrives when: the steps are the same as if all had arrived in order."""
    steps, ready, taken = [], set[int](), 0
    for arrived in [*order, None]:
        if arrived is not None:
            ready.add(arrived)
        while True:
            missing = [index for index in range(8) if index not in ready and index >= taken]
            chosen = choose(
                candidates(*(ready - set(range(taken)))),
                size=StepSize(rollouts=2),
                stop_before=min(missing, default=None),
                is_last=False,
            )
            if not chosen:
                break
            steps.append(chosen)
            taken += len(chosen)
    assert steps == [["r0", "r1"], ["r2", "r3"], ["r4", "r5"], ["r6", "r7"]]


def test_staleness_counts_from_the_policy_that_the_step_starts_with() -> None:
    assert staleness(step=1, policy_version=0) == 0
    assert staleness(step=5, policy_version=2) == 2
    assert not is_stale(step=5, policy_version=2, max_off_policy_steps=2)
    assert is_stale(step=6, policy_version=2, max_off_policy_steps=2)


@pytest.mark.parametrize(
    ("oldest_live", "expected"),
    [(None, [0, 1, 2]), (2, [0, 1]), (0, []), (9, [0, 1, 2])],
)
def test_a_version_is_orphaned_when_older_than_live_work_and_than_off_policy_allows(
    oldest_live: int | None, expected: list[int]
) -> None:
    rules = SweepRules(step=5, max_off_policy_steps=2, oldest_live=oldest_live)
    assert orphaned_versions([0, 1, 2, 3, 4], rules) == expected


def test_a_sweep_spares_what_is_held() -> None:
    files = [("a", 10), ("b", 20), ("c", 30)]
    plan = plan_version(1, files, lambda file: file == "b")
    assert (plan.files, plan.size_bytes, plan.kept_count, plan.is_whole) == (
        ("a", "c"),
        40,
        1,
        False,
    )
    assert plan_version(1, files, lambda _: False).is_whole


def test_phases_go_one_way_and_the_first_reason_stands() -> None:
    run = Run().paused().resumed()
    assert run.phase is Phase.RUNNING
    assert run.resumed() == run
    draining = run.draining(leases_until_s=10.0, drain_until_s=20.0)
    assert draining.paused() == draining
    sooner = draining.draining(leases_until_s=5.0, drain_until_s=50.0)
    assert (sooner.leases_until_s, sooner.drain_until_s) == (5.0, 20.0)
    stopped = draining.stopped("broken").stopped("again")
    assert (stopped.phase, stopped.reason) == (Phase.STOPPED, "broken")
    assert (
        stopped.ended("drained")
        == stopped
        == stopped.draining(leases_until_s=1.0, drain_until_s=1.0)
    )
    assert Run().paused().ended("done").lease_problem() is not None


def test_a_stopped_run_is_reopened_where_the_fault_found_it() -> None:
    draining = Run().draining(leases_until_s=10.0, drain_until_s=20.0)
    for run in (Run(), Run().paused(), draining, Run().paused().resumed()):
        reopened = run.stopped("broken").stopped("again").reopened()
        assert reopened == replace(run, reason="reopened after: broken")
        assert reopened.reopened() == reopened
        again = reopened.stopped("once more").reopened()
        assert again == replace(run, reason="reopened after: once more")
    assert Run().stopped("broken").paused().reopened().phase is Phase.PAUSED
    assert draining.stopped("broken").paused().reopened().phase is Phase.DRAINING


def test_a_run_that_an_earlier_version_stopped_goes_on_or_drains() -> None:
    stopped = replace(Run().stopped("broken"), stopped_in=None)
    assert stopped.reopened().phase is Phase.RUNNING
    assert replace(stopped, drain_until_s=20.0).reopened().phase is Phase.DRAINING


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq_len": 10, "cp_size": 4},
        {"seq_len": 12, "cp_size": 4, "layout": "zigzag"},
        {"payload_root": "relative/path"},
        {"feed_url": "ftp://feed"},
        {"run_id": "a/b"},
        {"max_off_policy_steps": -1},
        {"unknown": 1},
    ],
)
def test_settings_that_cannot_work_fail_at_start(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        OrchestratorSettings(**wrong)  # type: ignore[arg-type]  # that is the test
