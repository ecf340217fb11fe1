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
    def concatenate(parts: "Sequence[Runs]") -> "Runs":
        """All values in order; equal neighbours are joined. At least one part."""
        return _joined(
            np.concatenate([part.values_R for part in parts]),
            np.concatenate([part.lengths_R for part in parts]),
        )

    def slice(self, start: int, stop: int) -> "Runs":
        """Tokens [start, stop)."""
        assert 0 <= start <= stop <= len(self), "a range outside the column is the caller's bug"
        ends = np.cumsum(self.lengths_R, dtype=np.int64)
        begins = ends - self.lengths_R
        kept = np.minimum(ends, stop) - np.maximum(begins, start)
        inside = kept > 0
        return Runs(self.values_R[inside], kept[inside].astype(np.int32))

    def windows(self, starts_W: NDArray[np.int64], stops_W: NDArray[np.int64]) -> "Runs":
        """Tokens of each window [start, stop), one after the other. Windows are not empty.

        Costs runs × log(runs) and what comes out, whatever the tokens.
        """
        ends_R = np.cumsum(self.lengths_R, dtype=np.int64)
        begins_R = ends_R - self.lengths_R
        first_W = np.searchsorted(ends_R, starts_W, side="right")
        counts_W = np.searchsorted(begins_R, stops_W, side="left") - first_W
        before_W = np.cumsum(counts_W) - counts_W
        run = np.arange(counts_W.sum()) + np.repeat(first_W - before_W, counts_W)
        stops = np.minimum(ends_R[run], np.repeat(stops_W, counts_W))
        lengths = stops - np.maximum(begins_R[run], np.repeat(starts_W, counts_W))
        return _joined(self.values_R[run], lengths)

    def expand(self) -> Column:
        """The dense column [T]."""
        return cast("Column", np.repeat(self.values_R, self.lengths_R))


def _joined(values: Column, lengths: NDArray[np.int32] | NDArray[np.int64]) -> Runs:
    """Runs of which equal neighbours are one; bitwise, so that NaN and -0.0 survive."""
    if len(values) == 0:
        return Runs(values, lengths.astype(np.int32))
    bits = values.view(np.int32)
    firsts = np.flatnonzero(np.concatenate(([True], bits[1:] != bits[:-1])))
    return Runs(values[firsts], np.add.reduceat(lengths, firsts).astype(np.int32))
