"""Group-relative advantages."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sideband.errors import InvalidInput


def group_advantages(rewards_G: Sequence[float]) -> NDArray[np.float32]:
    """reward - mean for each of the G members that were delivered, in the order given.

    A member's advantage depends on the group's rewards and not on who arrived first, and is exactly
    0 when all rewards are equal. Raises InvalidInput for an empty group or a reward that is not
    finite.
    """
    if not rewards_G or not all(math.isfinite(reward) for reward in rewards_G):
        raise InvalidInput("rewards", list(rewards_G), "must be finite, at least one")
    # The mean as least + an exact sum of differences: a plain sum would round by order, and give
    # a group of equal rewards a tiny advantage that "nothing to learn" filters do not see.
    least = min(rewards_G)
    mean = least + math.fsum(reward - least for reward in rewards_G) / len(rewards_G)
    return np.array([reward - mean for reward in rewards_G], np.float32)
