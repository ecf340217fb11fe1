"""Rows of different length as CSR in memory: kept sets of sampled tokens, and what is said of them.

Legend: N rows, M values in all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

VALUES_AT_ONCE: Final = 1 << 16  # of passes over arrays: bounds what decoding holds beyond its rows
_PARTS_AT_ONCE: Final = 1024  # as objects, which weigh far more than the rows of a small one

Value = TypeVar("Value", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedRows(Generic[Value]):
    """Row i holds ``values_M[starts_N[i]:starts_N[i + 1]]``.

    ``starts_N`` has N + 1 entries and begins with 0. An empty row means "none".
    """

    starts_N: NDArray[np.int64]
    values_M: NDArray[Value]

    dtype: ClassVar[np.dtype[np.generic]]

    def __len__(self) -> int:
        return len(self.starts_N) - 1

    def __getitem__(self, index: int) -> NDArray[Value]:
        """The values of one row."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.values_M[self.starts_N[index] : self.starts_N[index + 1]]

    def slice(self, start: int, stop: int) -> Self:
        """Rows [start, stop); shares memory of the values."""
        assert 0 <= start <= stop <= len(self), "a row range outside the rows is the caller's bug"
        first, last = self.starts_N[start], self.starts_N[stop]
        return type(self)(self.starts_N[start : stop + 1] - first, self.values_M[first:last])

    def with_ids(self) -> Self:
        """The rows that keep ids, in order; shares memory of the values."""
        has_ids_N = self.starts_N[1:] > self.starts_N[:-1]
        if has_ids_N.all():
            return self
        starts_N = np.append(self.starts_N[:-1][has_ids_N], self.starts_N[-1])
        return type(self)(starts_N, self.values_M)

    def equals(self, other: "RaggedRows[Any]") -> bool:
        """Bitwise equality of both arrays, and of what they are."""
        return type(self) is type(other) and (
            np.array_equal(self.starts_N, other.starts_N)
            and self.values_M.dtype == other.values_M.dtype
            and self.values_M.tobytes() == other.values_M.tobytes()
        )

    @classmethod
    def empty(cls, rows: int) -> Self:
        """``rows`` empty rows."""
        return cls(np.zeros(rows + 1, np.int64), np.zeros(0, cls.dtype))

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """All rows of all parts, in order."""
        if len(parts) < 2:
            return parts[0] if parts else cls.empty(0)
        starts = np.zeros(sum(map(len, parts)) + 1, np.int64)
        row = 0
        for part in parts:
            stop = row + len(part)
            np.add(part.starts_N[1:], starts[row], out=starts[row + 1 : stop + 1])
            row = stop
        return cls(starts, np.concatenate([part.values_M for part in parts]))

    @classmethod
    def gathered(cls, parts: Iterable[Self]) -> Self:
        """The same of parts that come one by one, which may be many and small."""
        joined: list[Self] = []
        pending: list[Self] = []
        for part in parts:
            pending.append(part)
            if len(pending) == _PARTS_AT_ONCE:
                joined.append(cls.concatenate(pending))
                pending.clear()
        return cls.concatenate(joined + pending)


class MaskRows(RaggedRows[np.int32]):
    """Kept sets: ascending, unique vocabulary ids per row.

    An empty row means "no replay" (tool and environment tokens); a greedy row keeps exactly one
    id. The two are never mixed up.
    """

    __slots__ = ()
    dtype = np.dtype(np.int32)

    @property
    def ids_M(self) -> NDArray[np.int32]:
        """The kept ids of all rows."""
        return self.values_M


class ScoreRows(RaggedRows[np.float32]):
    """Log-probabilities of kept ids, in the order of the ids: as many in a row as it keeps."""

    __slots__ = ()
    dtype = np.dtype(np.float32)
