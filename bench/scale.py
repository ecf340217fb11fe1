"""How large a run is: ``tiny`` for tests, ``quick`` for two cores and a few minutes, ``full``."""

from dataclasses import dataclass
from typing import Final, Literal, TypeVar

ScaleName = Literal["tiny", "quick", "full"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scale:
    """One size of all rows. ``rounds`` is how often every side of a row is timed."""

    name: ScaleName
    rounds: int

    def pick(self, *, tiny: T, quick: T, full: T) -> T:
        """The value for this scale."""
        return {"tiny": tiny, "quick": quick, "full": full}[self.name]


TINY: Final = Scale("tiny", rounds=1)
QUICK: Final = Scale("quick", rounds=5)
FULL: Final = Scale("full", rounds=9)
SCALES: Final[dict[str, Scale]] = {scale.name: scale for scale in (TINY, QUICK, FULL)}
