"""Spread micro batches over DP ranks: equal counts, like costs.

Ranks meet after every micro batch (sharded weights are gathered, experts exchange tokens), so
what counts is the slowest rank of each round, then the totals.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sideband.errors import InvalidInput

B = TypeVar("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostWeights:
    """Estimated cost of a micro batch: ``per_token`` × L + ``per_token_pair`` × Σ length².

    The default says that attention costs as much as all the rest at 16 k tokens, which is near
    the truth for the public models of 10 to 100 B parameters that activate a tenth of them.
    """

    per_token: float = 1.0
    per_token_pair: float = 1.0 / 16384

    def __post_init__(self) -> None:
        if not (self.per_token > 0 and self.per_token_pair >= 0):
            raise InvalidInput("cost_weights", self, "must be positive")

    def of_row(self, row_tokens: int, lengths: Iterable[int]) -> float:
        """The estimate for a row: its tokens, pads too, and the real lengths of its sequences."""
        pairs = sum(length * length for length in lengths)
        return self.per_token * row_tokens + self.per_token_pair * pairs


def balance(
    items: Sequence[B], *, dp_size: int, cost: Callable[[B], float], dummy: Callable[[], B]
) -> list[list[B]]:
    """``dp_size`` lists of equal length that hold every item once, filled up with dummies.

    Round i hands out the next ``dp_size`` items by descending cost, the dearest to the rank with
    the least so far. So the costs within a round are neighbours, and the totals never differ by
    more than the widest round. Equal inputs in equal order give equal lists. At least one round.
    """
    if dp_size < 1:
        raise InvalidInput("dp_size", dp_size, "must be at least 1")
    costs = [cost(item) for item in items]
    order = sorted(range(len(items)), key=lambda index: (-costs[index], index))
    lists: list[list[B]] = [[] for _ in range(dp_size)]
    loads = [0.0] * dp_size
    for first in range(0, max(len(order), 1), dp_size):
        taken = order[first : first + dp_size]
        by_load = sorted(range(dp_size), key=lambda rank: (loads[rank], rank))
        for place, rank in enumerate(by_load):
            if place < len(taken):
                lists[rank].append(items[taken[place]])
                loads[rank] += costs[taken[place]]
            else:
                lists[rank].append(dummy())
    return lists
