"""Kept sets of sampled tokens as CSR rows in memory.

Legend: N rows, M kept ids in all.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class MaskRows:
    """Row i keeps ``ids_M[starts_N[i]:starts_N[i + 1]]``: ascending, unique vocabulary ids.

    ``starts_N`` has N + 1 entries and begins with 0. An empty row means "no replay" (tool and
    environment tokens); a greedy row keeps exactly one id. The two are never mixed up.
    """

    starts_N: NDArray[np.int64]
    ids_M: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.starts_N) - 1

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        """The kept ids of one row."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.ids_M[self.starts_N[index] : self.starts_N[index + 1]]

    def slice(self, start: int, stop: int) -> "MaskRows":
        """Rows [start, stop); shares memory of the ids."""
        assert 0 <= start <= stop <= len(self), "a row range outside the rows is the caller's bug"
        first, last = self.starts_N[start], self.starts_N[stop]
        return MaskRows(self.starts_N[start : stop + 1] - first, self.ids_M[first:last])

    def with_ids(self) -> "MaskRows":
        """The rows that keep ids, in order; shares memory of the ids."""
        has_ids_N = self.starts_N[1:] > self.starts_N[:-1]
        if has_ids_N.all():
            return self
        return MaskRows(np.append(self.starts_N[:-1][has_ids_N], self.starts_N[-1]), self.ids_M)

    def equals(self, other: "MaskRows") -> bool:
        """Bitwise equality of both arrays."""
        return np.array_equal(self.starts_N, other.starts_N) and np.array_equal(
            self.ids_M, other.ids_M
        )

    @staticmethod
    def empty(rows: int) -> "MaskRows":
        """``rows`` rows without replay."""
        return MaskRows(np.zeros(rows + 1, np.int64), np.zeros(0, np.int32))

    @staticmethod
    def concatenate(parts: "list[MaskRows]") -> "MaskRows":
        """All rows of all parts, in order."""
        if not parts:
            return MaskRows.empty(0)
        counts = np.concatenate([np.diff(part.starts_N) for part in parts])
        starts = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        return MaskRows(starts, np.concatenate([part.ids_M for part in parts]))
