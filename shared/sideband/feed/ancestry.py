"""Which steps of each lineage a run still holds, after its trainer went back a few times. Pure.

A *return* (lineage, step): the trainer went back to ``step``, and ``lineage`` began. A *line* is
the returns that still bound something, ascending in both: one to a step that lies not before that
of a later one bounds nothing any more.
"""

from typing import Final

Return = tuple[int, int]
Line = tuple[Return, ...]
RETURNS_MAX: Final = 1024  # beyond it, less is taken for held: never more


def line_after(line: Line, *, lineage: int, step: int) -> Line:
    """``line``, and the trainer goes back to ``step``: ``lineage`` begins."""
    longer = (*(one for one in line if one[1] < step), (lineage, step))
    if len(longer) <= RETURNS_MAX:
        return longer
    (_, lowest), (begun, _), *rest = longer
    return ((begun, lowest), *rest)


def last_held(line: Line, lineage: int) -> int | None:
    """The last step that was trained in ``lineage`` and is still of the run; None: all are."""
    return next((step for begun, step in line if begun > lineage), None)
