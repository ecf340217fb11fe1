"""What each rank has committed. It outlives the processes that said so."""

from collections.abc import Callable

from sideband.feed.least import Least


class Commits:
    """The last committed step by global rank. ``base``: what a rank has that said nothing."""

    def __init__(self, rank_count: int) -> None:
        self.steps: dict[int, int] = {}
        self._lineages: dict[int, int | None] = {}  # of those that did not only claim theirs
        self._rank_count = rank_count
        self._least: Least[int] = Least()
        self._has_news = False

    def least(self, *, base: int) -> int:
        """Every rank has committed this step and all before."""
        ranks = range(self._rank_count)
        return self._least.of(lambda: (self.steps.get(rank, base) for rank in ranks))

    def record(self, global_rank: int, step: int, *, lineage: int | None, base: int) -> None:
        """The rank commits ``step``; ``lineage`` as whoever says so knows it."""
        self.claim(global_rank, step, base=base)
        self._lineages[global_rank] = lineage

    def claim(self, global_rank: int, step: int, *, base: int) -> None:
        """A process says hello with ``step`` committed; it may be an earlier one than before."""
        before = self.steps.get(global_rank, base)
        if before < step:
            self._least.left(before)
        else:
            self._least.reset()  # a new process begins again earlier
        if self.steps.get(global_rank) != step:
            self._lineages.pop(global_rank, None)
        self.steps[global_rank], self._has_news = step, True

    def restart(self, step: int) -> None:
        """Every rank has committed ``step`` and nothing after it."""
        self.steps = dict.fromkeys(range(self._rank_count), step)
        self._lineages = {}
        self._least.reset()
        self._has_news = True

    def keep(self, is_right: Callable[[int | None, int], bool]) -> None:
        """Forget what was only claimed, and commits unless ``is_right(lineage, step)``."""
        self.steps = {
            rank: step
            for rank, step in self.steps.items()
            if rank in self._lineages and is_right(self._lineages[rank], step)
        }
        self._least.reset()

    def take_news(self) -> bool:
        """Whether anything was recorded since the last call."""
        has_news, self._has_news = self._has_news, False
        return has_news
