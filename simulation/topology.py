"""Grids of trainer ranks, and what one run on a grid cost."""

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Trainer ranks: data × context parallel, and how a packed row is cut."""

    dp_size: int
    cp_size: int
    layout: Literal["contiguous", "zigzag"]

    @property
    def name(self) -> str:
        """For people and file names."""
        return f"dp{self.dp_size}-cp{self.cp_size}-{self.layout}"

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.dp_size * self.cp_size


TOPOLOGIES: Final = tuple(
    Topology(dp_size=dp_size, cp_size=cp_size, layout=layout)
    for dp_size, cp_size in ((2, 1), (2, 2), (1, 4))
    for layout in ("contiguous", "zigzag")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a trainer's side cost. Memory is the peak beyond what a process holds when idle."""

    step_bytes: int = 0
    feed_bytes: int = 0
    orchestrator_grown_bytes: int = 0
    feed_grown_bytes: int = 0
    rank_grown_bytes: int = 0
    files_left: int = 0
    files_used: int = 0
