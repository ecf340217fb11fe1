"""What each rank has committed. It outlives the processes that said so."""

from collections.abc import Callable

from sideband.feed.least import Least


class Commits:
    """The last committed step by global rank. ``base``: what a rank has that said nothing."""

    def __init__(self, rank_count: int) -> None:
        self.steps: dict[int, int] = {}
        # What was confirmed, and not only claimed in a hello, by the lineage that it was said in:
        # None, and the last that was heard of, as there is none after the run's.
        self._confirmed: dict[int, dict[int | None, int]] = {}
        self._rank_count = rank_count
        self._least: Least[int] = Least()
        self.has_news = False  # something may have to be forgotten

    def least(self, *, base: int) -> int:
        """Every rank has committed this step and all before."""
        ranks = range(self._rank_count)
        return self._least.of(lambda: (self.steps.get(rank, base) for rank in ranks))

    def record(self, global_rank: int, step: int, *, lineage: int | None, base: int) -> None:
        """The rank commits ``step`` and all before; ``lineage`` as whoever says so knows it."""
        if step > self.steps.get(global_rank, 0):
            self._set(global_rank, step, base=base)
        known = self._confirmed.get(global_rank, {})
        known = known | {lineage: max(step, known.get(lineage, 0))}
        last = max((each for each in known if each is not None), default=None)
        self._confirmed[global_rank] = {each: known[each] for each in known if each in {None, last}}

    def claim(self, global_rank: int, step: int, *, lineage: int | None, base: int) -> None:
        """A process says hello with ``step`` committed; it may be an earlier one than before.

        Of what another lineage has committed it says nothing.
        """
        self._confirmed[global_rank] = {
            each: confirmed
            for each, confirmed in self._confirmed.get(global_rank, {}).items()
            if confirmed == step or (lineage is not None and each not in {None, lineage})
        }
        self._set(global_rank, step, base=base)

    def _set(self, global_rank: int, step: int, *, base: int) -> None:
        before = self.steps.get(global_rank, base)
        if before < step:
            self._least.left(before)
        else:
            self._least.reset()  # a new process begins again earlier
        self.steps[global_rank], self.has_news = step, True

    def restart(self, step: int) -> None:
        """Every rank has committed ``step`` and nothing after it."""
        self.steps = dict.fromkeys(range(self._rank_count), step)
        self._confirmed = {}
        self._least.reset()
        self.has_news = True

    def keep(self, is_right: Callable[[int | None, int], bool]) -> None:
        """Forget what was only claimed, and commits unless ``is_right(lineage, step)``."""
        self._confirmed = {
            rank: {each: step for each, step in known.items() if is_right(each, step)}
            for rank, known in self._confirmed.items()
        }
        self.steps = {rank: max(known.values()) for rank, known in self._confirmed.items() if known}
        self._least.reset()

    def take_news(self) -> bool:
        """Whether anything was recorded since the last call."""
        has_news, self.has_news = self.has_news, False
        return has_news
