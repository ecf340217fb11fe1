"""What a run found, as plain data: written to JSON, and from there to the page and the plots."""

from typing import Literal

import msgspec

Verdict = Literal["met", "missed", "open"]  # open: no target, or not measurable on this machine


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a row. ``held_bytes`` and ``peak_bytes`` are the process's own, see memory."""

    side: str
    seconds: float | None = None  # median over the rounds
    spread: float | None = None  # (slowest - fastest) / median
    bytes: int | None = None
    held_bytes: int | None = None
    peak_bytes: int | None = None
    rate: float | None = None
    rate_unit: str = ""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One number that the row is about, beside its target when it has one."""

    what: str
    value: float
    unit: str
    target: float | None = None
    is_ceiling: bool = False  # the value must stay at or below the target

    @property
    def verdict(self) -> Verdict:
        """Whether the target holds."""
        if self.target is None:
            return "open"
        holds = self.value <= self.target if self.is_ceiling else self.value >= self.target
        return "met" if holds else "missed"


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a curve."""

    name: str
    points: list[tuple[float, float]]


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One plot; ``log`` says which axes are logarithmic."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: list[Series]
    log: Literal["x", "xy"] = "xy"


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one row found. ``setting`` says in words what was measured."""

    name: str
    title: str
    setting: str
    measurements: list[Measurement] = []
    claims: list[Claim] = []
    curves: list[Curve] = []
    notes: list[str] = []
    seconds_spent: float = 0.0


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run took place: numbers of two machines do not compare."""

    processor: str
    cores: int
    memory_bytes: int
    filesystem: str
    kernel: str
    python: str
    load_before: float  # one-minute load average at the start: above 0.5, others worked too


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    scale: str
    machine: Machine
    versions: dict[str, str]
    rows: list[RowResult]
