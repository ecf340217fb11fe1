"""The least of what the ranks have reached, without looking at all of them for every message."""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from sideband.feed.facts import Place

T = TypeVar("T", int, Place)


class Least(Generic[T]):
    """Counts who is at the least value, and looks for a new one when nobody is left there.

    Where all ranks move in step that costs one look at them per value, not one per message.
    """

    def __init__(self) -> None:
        self._least: T | None = None
        self._count = 0

    def left(self, value: T) -> None:
        """A rank that was at ``value`` is further now."""
        if value == self._least:
            self._count -= 1

    def reset(self) -> None:
        """Some value may have become smaller, or belongs to another rank now."""
        self._count = 0

    def of(self, values: Callable[[], Iterable[T]]) -> T:
        """The least of ``values``, asked for only when it may have changed. Not for none."""
        if self._least is None or self._count <= 0:
            found = list(values())
            self._least = min(found)
            self._count = found.count(self._least)
        return self._least
