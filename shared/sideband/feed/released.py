"""Up to where all ranks have read, so that their trainers may have it."""

from collections.abc import Callable, Iterable

from sideband.feed.facts import FIRST, Place
from sideband.feed.least import Least


class Released:
    """Every rank of this generation has read everything before ``place``."""

    def __init__(self) -> None:
        self.place: Place = FIRST
        self._least: Least[Place] = Least()
        self._has_news = False

    def rank_read_on(self, before: Place) -> None:
        """A rank is further than ``before`` now, where it was."""
        self._least.left(before)
        self._has_news = True

    def ranks_changed(self) -> None:
        """Another process speaks for a rank."""
        self._least.reset()
        self._has_news = True

    def restart(self) -> None:
        """Nothing is released to those who come."""
        self.place = FIRST
        self._least.reset()

    def settle(self, reads: Callable[[], Iterable[Place]]) -> bool:
        """Whether all have read further; ``reads`` is asked only where that may be so."""
        if not self._has_news:
            return False
        self._has_news = False
        least = self._least.of(reads)
        if least <= self.place:
            return False
        self.place = least
        return True
