"""Run-length columns: what is constant per sample costs nothing per token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float32] | NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """A column of T values as runs: value ``values_R[i]`` stands ``lengths_R[i]`` times (> 0)."""

    values_R: Column
    lengths_R: NDArray[np.int32]

    def __len__(self) -> int:
        return int(self.lengths_R.sum(dtype=np.int64))

    @staticmethod
    def of(column_T: Column) -> "Runs":
        """The shortest runs of a dense column; bitwise, so that NaN and -0.0 survive."""
        if len(column_T) == 0:
            return Runs(column_T[:0], np.zeros(0, np.int32))
        bits = column_T.view(np.int32)
        firsts = np.flatnonzero(np.concatenate(([True], bits[1:] != bits[:-1])))
        return Runs(column_T[firsts], np.diff(firsts, append=len(column_T)).astype(np.int32))

    @staticmethod
    def constant(value: float, length: int) -> "Runs":
        """One float32 value for ``length`` tokens."""
        count = 1 if length else 0
        return Runs(np.full(count, value, np.float32), np.full(count, length, np.int32))

    @staticmethod
    def concatenate(parts: "Sequence[Runs]") -> "Runs":
        """All values in order; equal neighbours are joined. At least one part."""
        values = np.concatenate([part.values_R for part in parts])
        lengths = np.concatenate([part.lengths_R for part in parts])
        if len(values) == 0:
            return Runs(values, lengths)
        bits = values.view(np.int32)
        firsts = np.flatnonzero(np.concatenate(([True], bits[1:] != bits[:-1])))
        return Runs(values[firsts], np.add.reduceat(lengths, firsts).astype(np.int32))

    def slice(self, start: int, stop: int) -> "Runs":
        """Tokens [start, stop)."""
        assert 0 <= start <= stop <= len(self), "a range outside the column is the caller's bug"
        ends = np.cumsum(self.lengths_R, dtype=np.int64)
        begins = ends - self.lengths_R
        kept = np.minimum(ends, stop) - np.maximum(begins, start)
        inside = kept > 0
        return Runs(self.values_R[inside], kept[inside].astype(np.int32))

    def expand(self) -> Column:
        """The dense column [T]."""
        return cast("Column", np.repeat(self.values_R, self.lengths_R))
