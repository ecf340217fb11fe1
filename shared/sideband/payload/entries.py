"""The block index as plain numbers, a bounded part of it at a time."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

_AT_ONCE: Final = 4096  # whatever a header claims: an entry weighs ten times as much as an object

Entry = tuple[int, int, int, int]  # offset, stored bytes, rows, checksum


def entries_of(index: NDArray[np.void]) -> Iterator[Entry]:
    """The entries in order."""
    for first in range(0, len(index), _AT_ONCE):
        yield from index[first : first + _AT_ONCE].tolist()
