"""A delivery beside the files that it names, and what the log says of it."""

from dataclasses import replace

import structlog

from services.orchestrator.collecting import Delivery
from services.orchestrator.errors import RolloutRefused
from services.orchestrator.files import Files, FilesGone
from services.orchestrator.intake import refused
from services.orchestrator.records import DropReason, Rollout
from services.orchestrator.retention import Retention
from sideband.segments import PayloadSegment

log = structlog.get_logger(__name__)


async def with_files_checked(
    delivery: Delivery, files: Files, retention: Retention, *, wait_s: float
) -> Delivery:
    """The delivery, dropped or refused where its files are gone or say something else."""
    segments = [
        segment
        for sample in delivery.samples
        for segment in sample.segments
        if isinstance(segment, PayloadSegment)
        # What retention gave up is told from memory; it must not be waited for.
        and not retention.is_given_up(segment.file)
    ]
    try:
        await files.check(segments, wait_s=wait_s)
    except FilesGone as exc:
        return replace(
            delivery,
            drop=DropReason.FILES_GONE,
            detail=str(exc),
            samples=(),
            files_trained=frozenset(),
        )
    except RolloutRefused as refusal:
        return refused(delivery, refusal)
    return delivery


class DeliveryLog:
    """One line for what is worth one; missing masks once, the metric counts every one."""

    def __init__(self) -> None:
        self._has_warned_of_masks = False

    def note(self, rollout: Rollout) -> None:
        """A rollout was delivered for the first time."""
        tally = rollout.tally
        facts = {
            "rollout_id": rollout.rollout_id,
            "state": rollout.state.value,
            "samples": tally.samples,
        }
        if rollout.reason is not None:
            log.info("rollout_dropped", reason=rollout.reason, detail=rollout.detail, **facts)
        else:
            log.debug("rollout_collected", **facts)
        if tally.samples_with_holes:
            missing = tally.routing_positions - tally.routing_rows
            log.warning("routing_has_holes", rows_missing=missing, **facts)
        if tally.mask_rows < tally.mask_positions and not self._has_warned_of_masks:
            self._has_warned_of_masks = True
            log.warning(
                "sampling_masks_missing", tokens=tally.mask_positions - tally.mask_rows, **facts
            )
