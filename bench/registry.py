"""The rows: each a question, asked of all its sides in one run."""

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from bench.results import RowResult
from bench.scale import Scale

MODULES: Final = (
    "pack_encode",
    "step_memory",
    "engine_write",
    "masks",
    "routing_packed",
    "rank_read",
    "proxy",
    "feed",
    "feed_load",
    "curves",
    "files_curve",
    "leases_curve",
    "orchestrator_load",
    "plugin_overhead",
)
Measure = Callable[[Scale], RowResult]


@dataclass(frozen=True, slots=True)
class Row:
    """A named measurement."""

    name: str
    measure: Measure

    def run(self, scale: Scale) -> RowResult:
        """What it found, and how long finding it took."""
        begin = time.perf_counter()
        result = self.measure(scale)
        return msgspec.structs.replace(result, seconds_spent=time.perf_counter() - begin)


def rows() -> list[Row]:
    """All rows, in the order of the page."""
    found: list[Row] = []
    for module in MODULES:
        found += importlib.import_module(f"bench.rows.{module}").ROWS
    return found
