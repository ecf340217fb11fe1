"""The session book alone: what is asked for is what was not given, within its bounds."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_proxy.limits import BRANCHES_MAX, SESSION_FILES_MAX
from services.inference_proxy.sessions import (
    Session,
    SessionBook,
    Tokens,
    VersionChanged,
    common_prefix,
    covered_until,
)
from sideband.ids import RequestId, SessionId

S1, S2, S3 = (SessionId(f"s{i}") for i in (1, 2, 3))
R = RequestId("r")


def array(*tokens: int) -> Tokens:
    return np.asarray(tokens, np.int32)


def book(*, sessions_max: int = 10, tokens_max: int = 1000) -> SessionBook:
    return SessionBook(sessions_max=sessions_max, tokens_max=tokens_max)


def deliver(sessions: SessionBook, session_id: SessionId, tokens: list[int], covered: int) -> None:
    session = sessions.enter(session_id, asked=None, applied=0)
    sessions.deliver(session, R, array(*tokens[:1]), [(array(*tokens), covered)], [])


turns = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=5),  # prompt
        st.lists(st.integers(0, 1), min_size=1, max_size=3),  # completion
        st.integers(0, 8),  # where an invalid row breaks the coverage
    ),
    max_size=10,
)


@given(turns)
def test_rows_that_are_not_asked_for_were_given_by_one_turn_with_that_prefix(
    turns: list[tuple[list[int], list[int], int]],
) -> None:
    sessions = book()
    session = sessions.enter(S1, asked=None, applied=0)
    given_rows: list[tuple[list[int], int]] = []
    for prompt, completion, hole in turns:
        start = session.prompt_start(array(*prompt))
        assert start <= len(prompt)
        if start:
            assert any(
                covered >= start and tokens[:start] == prompt[:start]
                for tokens, covered in given_rows
            )
        tokens = prompt + completion
        stop = len(tokens) - 1
        # Rows [start, stop) come, and the one at `hole` is invalid.
        ranges = [
            (a, b) for a, b in ((start, min(hole, stop)), (max(hole + 1, start), stop)) if a < b
        ]
        covered = covered_until(start, ranges)
        assert covered <= max(start, stop)
        given_rows.append((tokens, covered))
        sessions.deliver(session, R, array(*prompt), [(array(*tokens), covered)], [])
        assert sessions.tokens == session.tokens


def test_of_two_branches_the_one_that_shares_most_decides() -> None:
    sessions = book()
    deliver(sessions, S1, [1, 2, 3, 4, 5], 4)
    deliver(sessions, S1, [1, 2, 9, 9, 9, 9], 2)
    session = sessions.enter(S1, asked=None, applied=0)
    assert session.prompt_start(array(1, 2, 3, 4, 5, 6)) == 4
    assert session.prompt_start(array(1, 2, 9, 9, 7)) == 2  # its rows from 2 on were invalid
    assert session.prompt_start(array(1, 2, 7)) == 2  # both share two
    assert session.prompt_start(array(7)) == 0


def test_a_turn_replaces_the_branch_that_it_extends() -> None:
    sessions = book()
    for size in range(2, 2 + 2 * BRANCHES_MAX):
        deliver(sessions, S1, list(range(size)), size - 1)
    session = sessions.enter(S1, asked=None, applied=0)
    assert len(session.branches) == 1
    for first in range(100, 100 + 2 * BRANCHES_MAX):
        deliver(sessions, S1, [first, 1], 1)
    assert len(session.branches) == BRANCHES_MAX


def test_a_pin_outlives_the_tokens_and_another_version_is_refused() -> None:
    sessions = book(tokens_max=10)
    deliver(sessions, S1, [1] * 8, 7)
    session = sessions.enter(S1, asked=None, applied=5)
    assert session.policy_version == 0
    deliver(sessions, S2, [2] * 8, 7)
    assert (session.tokens, sessions.tokens) == (0, 8)
    assert session.prompt_start(array(1, 1)) == 0
    with pytest.raises(VersionChanged):
        sessions.enter(S1, asked=5, applied=5)


def test_the_least_recent_idle_session_goes_first() -> None:
    sessions = book(sessions_max=2)
    first = sessions.enter(S1, asked=None, applied=0)
    sessions.enter(S2, asked=None, applied=0)
    first.in_flight = 1
    sessions.enter(S3, asked=None, applied=0)
    assert [session.session_id for session in sessions] == [S1, S3]


def test_a_discarded_session_tells_its_requests_and_remembers_nothing_more() -> None:
    sessions, told = book(), []
    session = sessions.enter(S1, asked=None, applied=0)
    session.on_discard.add(lambda: told.append(1))
    deliver(sessions, S1, [1, 2], 1)
    assert sessions.discard(S1) is session
    assert (told, session.is_discarded, sessions.tokens) == ([1], True, 0)
    sessions.deliver(session, R, array(1), [(array(1, 2), 1)], [])
    assert (sessions.tokens, len(sessions)) == (0, 0)
    assert sessions.discard(S1) is None


def test_files_are_bounded_and_named_once() -> None:
    sessions = book()
    session = sessions.enter(S1, asked=None, applied=0)
    for i in range(SESSION_FILES_MAX + 5):
        sessions.deliver(session, R, array(1), [], [f"f{i}", f"f{i}"])
    assert len(session.files) == SESSION_FILES_MAX
    assert list(session.files)[-1] == f"f{SESSION_FILES_MAX + 4}"


@given(st.lists(st.lists(st.sampled_from("abcdefg"), max_size=5), max_size=12))
def test_the_files_kept_are_the_latest_new_ones_in_order(named: list[list[str]]) -> None:
    session = Session(session_id=S1, policy_version=0)
    expected: list[str] = []
    with patch("services.inference_proxy.sessions.SESSION_FILES_MAX", 3):
        for files in named:
            session.deliver(R, array(1), [], files)
            expected = list(dict.fromkeys([*expected, *files]))[-3:]
            assert list(session.files) == expected


@given(st.lists(st.integers(0, 1), max_size=6), st.lists(st.integers(0, 1), max_size=6))
def test_common_prefix_is_what_both_share(left: list[int], right: list[int]) -> None:
    size = common_prefix(array(*left), array(*right))
    assert left[:size] == right[:size]
    assert size == min(len(left), len(right)) or left[size] != right[size]
