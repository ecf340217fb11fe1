"""The least of many values, looked for only when it may have changed."""

from hypothesis import given
from hypothesis import strategies as st

from sideband.feed.least import Least


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(-2, 3), st.booleans()), max_size=40),
)
def test_it_is_the_least_after_any_changes(
    values: list[int], changes: list[tuple[int, int, bool]]
) -> None:
    least: Least[int] = Least()
    assert least.of(lambda: values) == min(values)
    for index, change, is_asked in changes:
        at = index % len(values)
        if change > 0:
            least.left(values[at])
        elif change < 0:
            least.reset()
        values[at] += change
        if is_asked:
            assert least.of(lambda: values) == min(values)
    assert least.of(lambda: values) == min(values)


def test_ranks_that_move_in_step_are_looked_at_once_for_each_value() -> None:
    values, looks = [0] * 100, []

    def look() -> list[int]:
        looks.append(1)
        return values

    least: Least[int] = Least()
    for value in range(5):
        for index in range(100):
            assert least.of(look) == value
            least.left(value)
            values[index] += 1
    assert len(looks) == 5
