"""What a trainer keeps in its checkpoint, so that the feed knows what the checkpoint holds."""

from collections.abc import Mapping
from typing import TypedDict

import msgspec

from sideband.errors import InvalidInput
from sideband.feed.messages import Id, LineageNumber, StepNumber


class ResumePoint(TypedDict):
    """Plain values, for any file: ``step`` is the last whose optimizer step the checkpoint holds.

    ``lineage`` is how often the trainer had gone back when it got the step's micro batches.
    """

    run_id: str
    lineage: int
    step: int


class RestoredPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ``ResumePoint`` that was read back and checked."""

    run_id: Id
    lineage: LineageNumber
    step: StepNumber


def restored_point(
    kept: Mapping[str, object] | None, *, run_id: str | None, committed_step: int | None
) -> RestoredPoint | None:
    """What a checkpoint kept, if it kept any. Raises InvalidInput.

    What the trainer says besides must be the same.
    """
    if kept is None:
        return None
    try:
        point = msgspec.convert(dict(kept), RestoredPoint)
    except (msgspec.ValidationError, TypeError, ValueError) as exc:
        raise InvalidInput("resume", kept, f"must be what a checkpoint kept: {exc}") from exc
    if run_id not in {None, point.run_id}:
        raise InvalidInput("run_id", run_id, f"must be {point.run_id}, as resume says, or None")
    if committed_step not in {None, point.step}:
        rule = f"must be {point.step}, as resume says, or None"
        raise InvalidInput("committed_step", committed_step, rule)
    return point
