"""Does a sample's routing cover it? A hole drops the routing or is marked; it never misaligns."""

from dataclasses import dataclass, replace

from sideband.batch.types import Sample
from sideband.fields import FIELDS
from sideband.segments import by_field, holes


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOutcome:
    """``rows_needed`` = T - 1 (the last token has none), ``holes`` the ranges without rows.

    ``is_absent``: the sample came without any routing row. ``is_dropped``: it had rows, and lost
    them because of a hole.
    """

    rows_needed: int
    holes: tuple[tuple[int, int], ...]
    is_absent: bool
    is_dropped: bool

    @property
    def rows_missing(self) -> int:
        """Rows that the trainer will route itself; all of them when dropped."""
        if self.is_dropped:
            return self.rows_needed
        return sum(stop - start for start, stop in self.holes)


def check_routing(sample: Sample, *, keep_rest: bool) -> tuple[Sample, RoutingOutcome]:
    """The sample as it may train, and what was found. Check before truncating.

    A hole anywhere in [0, T - 1) of the whole sample drops all its rows about inputs; the others
    stay. With ``keep_rest`` they stay too, and the trainer sees each hole by ``routing_valid``.
    """
    needed = len(sample) - 1
    routing = by_field(sample.segments, "routed_experts")
    missing = tuple(holes(routing, start=0, stop=needed))
    outcome = RoutingOutcome(
        rows_needed=needed,
        holes=missing,
        is_absent=not routing,
        is_dropped=bool(routing and missing and not keep_rest),
    )
    if not outcome.is_dropped:
        return sample, outcome
    rest = tuple(each for each in sample.segments if FIELDS[each.field].about != "input")
    return replace(sample, segments=rest, form=sample.form if rest else None), outcome
