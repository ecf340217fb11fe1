"""How far behind the policy a rollout is when a step trains on it. Pure.

Step s trains on what was collected and yields v(s), so a rollout of v(k) is (s − 1) − k behind.
"""


def staleness(*, step: int, policy_version: int) -> int:
    """Steps between the policy that made the rollout and the one that step ``step`` starts from."""
    return (step - 1) - policy_version


def is_stale(*, step: int, policy_version: int, max_off_policy_steps: int) -> bool:
    """Whether it is too old for step ``step``, and so for every later one."""
    return staleness(step=step, policy_version=policy_version) > max_off_policy_steps
