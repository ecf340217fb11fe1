"""Sets of positions as ascending, disjoint, half-open ranges; ranges that touch are one."""

from bisect import bisect_left, bisect_right


class Ranges:
    """A growing set of positions. Each operation costs a search plus the ranges it joins."""

    def __init__(self) -> None:
        # Parallel lists: range i covers [starts[i], stops[i]), and stops[i] < starts[i + 1].
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        """Put [start, stop) in; an empty range changes nothing."""
        if start >= stop:
            return
        first = bisect_left(self._stops, start)  # the first range that reaches start
        last = bisect_right(self._starts, stop)  # the first range that begins after stop
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that are not in the set, ascending."""
        gaps: list[tuple[int, int]] = []
        index = bisect_right(self._stops, start)  # the first range that ends after start
        while start < stop:
            is_last = index == len(self._starts)
            gap_stop = stop if is_last else min(stop, self._starts[index])
            if start < gap_stop:
                gaps.append((start, gap_stop))
            if is_last:
                break
            start = self._stops[index]
            index += 1
        return gaps

    def to_list(self) -> list[tuple[int, int]]:
        """All ranges, ascending."""
        return list(zip(self._starts, self._stops, strict=True))
