"""How full the payload root may become. Pure.

At the high-water mark new work is refused, so that the disk is never full under an engine's write;
some way below it, it is admitted again.
"""

from dataclasses import dataclass
from typing import Final

LOW_WATER: Final = 0.05  # this much of a bound must be free again


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What was measured last. ``used_bytes`` is the run's; None where nobody asked."""

    free_bytes: int
    used_bytes: int | None = None


@dataclass(slots=True, kw_only=True)
class Quota:
    """The two marks, and which side of them the root is on."""

    free_bytes_min: int
    used_bytes_max: int | None
    usage: Usage | None = None
    is_full: bool = False

    def observe(self, usage: Usage) -> bool:
        """Take a measurement; whether the root has become full or stopped being so."""
        was_full, self.usage = self.is_full, usage
        slack = 1 + LOW_WATER if was_full else 1.0
        is_short = usage.free_bytes < self.free_bytes_min * slack
        is_over = (
            self.used_bytes_max is not None
            and usage.used_bytes is not None
            and usage.used_bytes * slack > self.used_bytes_max
        )
        self.is_full = is_short or is_over
        return self.is_full is not was_full

    def __str__(self) -> str:
        if self.usage is None:
            return "not measured yet"
        parts = [f"{self.usage.free_bytes} bytes are free, {self.free_bytes_min} must be"]
        if self.usage.used_bytes is not None:
            parts.append(f"{self.usage.used_bytes} are used, {self.used_bytes_max} may be")
        return "; ".join(parts)
