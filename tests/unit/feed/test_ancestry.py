"""What a run still holds of each lineage, against steps that were trained and taken back."""

from hypothesis import given
from hypothesis import strategies as st

from sideband.feed import ancestry
from sideband.feed.ancestry import Line, last_held, line_after


def line_of(*steps: int) -> Line:
    line: Line = ()
    for lineage, step in enumerate(steps, start=1):
        line = line_after(line, lineage=lineage, step=step)
    return line


def test_a_return_to_an_earlier_step_makes_those_before_it_say_nothing() -> None:
    assert line_of() == ()
    assert line_of(7, 4, 9) == ((2, 4), (3, 9))
    assert line_of(7, 9) == ((1, 7), (2, 9))
    assert line_of(7, 7) == ((2, 7),)


def test_what_a_lineage_left_is_bounded_by_each_return_after_it() -> None:
    line = line_of(7, 4, 9)
    assert [last_held(line, lineage) for lineage in range(5)] == [4, 4, 9, None, None]
    assert last_held((), 0) is None


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(0, 12), st.integers(0, 31))
def test_a_step_is_held_unless_a_later_return_went_before_it(
    steps: list[int], lineage: int, step: int
) -> None:
    held = last_held(line_of(*steps), lineage)
    is_taken_back = any(step > back for back in steps[lineage:])
    assert (held is None or step <= held) == (not is_taken_back)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=60), st.integers(2, 6))
def test_a_line_that_is_cut_to_its_bound_holds_less_and_never_more(
    steps: list[int], bound: int
) -> None:
    exact, kept = line_of(*steps), ancestry.RETURNS_MAX
    ancestry.RETURNS_MAX = bound  # type: ignore[misc]  # the real one takes minutes to reach
    try:
        cut = line_of(*steps)
    finally:
        ancestry.RETURNS_MAX = kept  # type: ignore[misc]
    assert len(cut) <= bound
    assert cut[-1] == exact[-1]
    assert list(cut) == sorted(cut)
    assert [step for _, step in cut] == sorted({step for _, step in cut})
    for lineage in range(len(steps) + 1):
        of_exact, of_cut = last_held(exact, lineage), last_held(cut, lineage)
        if of_exact is None:
            assert of_cut is None
        else:
            assert of_cut is not None
            assert of_cut <= of_exact
