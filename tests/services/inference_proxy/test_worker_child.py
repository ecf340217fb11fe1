"""When a worker counts as hanging, and when the next one begins in its place."""

import pytest

from services.inference_proxy.workers.child import BACKOFF_S, LASTED_S, SILENT_S_MAX, Child


def started(*, now_s: float = 0.0) -> Child:
    child = Child()
    child.begun(7, now_s=now_s)
    child.has_started = True
    return child


def test_one_that_is_heard_in_time_never_hangs() -> None:
    child = started()
    for _ in range(100):
        assert not child.hangs(SILENT_S_MAX, silent_s_max=SILENT_S_MAX)
        child.heard()


def test_silence_adds_up_until_it_is_too_long_and_the_next_begins_anew() -> None:
    child = started()
    assert [child.hangs(4.0, silent_s_max=10.0) for _ in range(3)] == [False, False, True]
    child.ended(now_s=1.0)
    assert not child.hangs(99.0, silent_s_max=10.0)
    child.begun(8, now_s=1.0)
    assert not child.hangs(99.0, silent_s_max=10.0), "it has not started yet"
    child.has_started = True
    assert not child.hangs(9.0, silent_s_max=10.0)


def test_the_next_one_begins_later_each_time_in_a_row() -> None:
    child = started()
    waits = []
    for _ in range(len(BACKOFF_S) + 1):
        waits.append(child.ended(now_s=0.0))
        child.begun(7, now_s=0.0)
        child.has_started = True
    assert waits == [*BACKOFF_S, BACKOFF_S[-1]]
    assert child.ended(now_s=LASTED_S + 1) == 0.0


@pytest.mark.parametrize(
    ("has_started", "failures", "code", "expected"),
    [(False, 0, 1, True), (False, 0, -9, False), (True, 0, 1, False), (False, 1, 1, False)],
)
def test_only_one_that_fails_before_it_ever_started_ends_the_parent(
    has_started: bool, failures: int, code: int, expected: bool
) -> None:
    child = Child(has_started=has_started, failures=failures)
    assert child.never_began(code) == expected
