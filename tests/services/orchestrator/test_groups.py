"""Groups: the mean is over what was delivered, and a group always completes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.errors import GroupClosed, GroupConflict, GroupFull
from services.orchestrator.groups import GroupResult, Groups
from sideband.ids import GroupId, RolloutId

G = GroupId("g")


def groups_of(size: int, joined: int | None = None) -> Groups:
    groups = Groups(closed_max=10)
    for index in range(size if joined is None else joined):
        groups.join(G, size=size, rollout_id=RolloutId(f"r{index}"), index=index, now_s=0.0)
    return groups


def deliver(groups: Groups, index: int, reward: float | None) -> GroupResult | None:
    return groups.deliver(G, RolloutId(f"r{index}"), reward=reward, now_s=0.0)


def fail(groups: Groups, index: int) -> GroupResult | None:
    return groups.fail(G, RolloutId(f"r{index}"), now_s=0.0)


def test_the_last_member_completes_the_group() -> None:
    groups = groups_of(3)
    assert deliver(groups, 1, 1.0) is None
    assert deliver(groups, 0, 0.0) is None
    result = deliver(groups, 2, 0.5)
    assert result is not None
    assert result.advantages == {"r0": -0.5, "r1": 0.5, "r2": 0.0}
    assert result.missing == 0


def test_failed_members_leave_the_mean() -> None:
    groups = groups_of(3)
    deliver(groups, 0, 1.0)
    fail(groups, 1)
    result = deliver(groups, 2, 3.0)
    assert result is not None
    assert result.advantages == {"r0": -1.0, "r2": 1.0}
    assert result.missing == 1


def test_a_group_whose_members_all_failed_completes_empty() -> None:
    groups = groups_of(2)
    fail(groups, 0)
    result = fail(groups, 1)
    assert result is not None
    assert (result.advantages, result.missing) == ({}, 2)


def test_a_failed_member_may_be_replaced_until_the_group_is_complete() -> None:
    groups = groups_of(2)
    fail(groups, 0)
    groups.join(G, size=2, rollout_id=RolloutId("again"), index=2, now_s=0.0)
    assert deliver(groups, 1, 1.0) is None
    result = groups.deliver(G, RolloutId("again"), reward=2.0, now_s=0.0)
    assert result is not None
    assert result.advantages == {"r1": -0.5, "again": 0.5}


def test_a_group_refuses_another_size_one_too_many_and_a_late_one() -> None:
    groups = groups_of(2)
    late = RolloutId("late")
    with pytest.raises(GroupConflict):
        groups.join(G, size=3, rollout_id=late, index=9, now_s=0.0)
    with pytest.raises(GroupFull):
        groups.join(G, size=2, rollout_id=late, index=9, now_s=0.0)
    deliver(groups, 0, 1.0)
    deliver(groups, 1, 1.0)
    with pytest.raises(GroupClosed):
        groups.join(G, size=2, rollout_id=late, index=9, now_s=0.0)


def test_an_incomplete_group_is_overdue_only_when_nobody_works_on_it() -> None:
    groups = groups_of(3, joined=2)
    deliver(groups, 0, 1.0)
    assert groups.overdue(now_s=100.0, timeout_s=10.0) == []
    deliver(groups, 1, 2.0)
    assert groups.overdue(now_s=9.0, timeout_s=10.0) == []
    assert groups.overdue(now_s=10.0, timeout_s=10.0) == [G]
    assert groups.close(G).missing == 1


def test_a_withdrawn_member_takes_its_reward_along() -> None:
    groups = groups_of(3)
    deliver(groups, 0, 100.0)
    groups.withdraw(G, RolloutId("r0"))
    deliver(groups, 1, 1.0)
    result = deliver(groups, 2, 3.0)
    assert result is not None
    assert result.advantages == {"r1": -1.0, "r2": 1.0}


@given(
    rewards=st.lists(st.none() | st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8),
    data=st.data(),
)
def test_advantages_do_not_depend_on_the_order_of_arrival(
    rewards: list[float | None], data: st.DataObject
) -> None:
    results = []
    orders: list[list[int]] = [
        list(range(len(rewards))),
        data.draw(st.permutations(range(len(rewards)))),
    ]
    for order in orders:
        groups, result = groups_of(len(rewards)), None
        for index in order:
            assert result is None
            reward = rewards[index]
            result = fail(groups, index) if reward is None else deliver(groups, index, reward)
        assert result is not None
        results.append(result)
    assert results[0] == results[1]
    given_rewards = [reward for reward in rewards if reward is not None]
    assert len(results[0].advantages) == len(given_rewards)
    if given_rewards:
        expected = np.array(given_rewards) - np.mean(given_rewards)
        found = np.array(list(results[0].advantages.values()))
        np.testing.assert_allclose(found, expected, atol=1e-3)
