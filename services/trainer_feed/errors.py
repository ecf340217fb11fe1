"""Problems of the feed: the only place that gives the library's errors an HTTP status.

::

    Problem (services.kit.problems)
    ├── WrongContentType 415     a step body is application/vnd.sideband.step+msgpack
    ├── StepMalformed 422        MalformedStep, UnreadableStep: the element is named
    ├── LineageRefused 409       going back: a later or another one is known
    ├── StepConflicts 409        other_run, other_grid, step_conflict, step_out_of_order, ended
    ├── FeedRestarted 412        the caller counts on steps that another process of the feed held
    ├── FeedBusy 503             full or paused: Retry-After says when to come again
    └── UnknownStep 404
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from services.kit.problems import Problem
from sideband.feed.errors import (
    FeedEnded,
    FeedFull,
    FeedPaused,
    LineageConflict,
    MalformedStep,
    OtherGridStep,
    OtherLineageStep,
    OtherRunStep,
    StepConflict,
    StepOutOfOrder,
    StepRefused,
    UnreadableStep,
)

RETRY_LATER: Final = {"Retry-After": "1"}


class WrongContentType(Problem):
    """A step comes in the binary form only."""

    status, code, title = 415, "wrong_content_type", "Wrong content type"


class StepMalformed(Problem):
    """A body that is no step of a version that is read here."""

    status, code, title = 422, "malformed_step", "Malformed step"


class StepConflicts(Problem):
    """A step that this feed never takes."""

    status, code, title = 409, "step_conflict", "Step refused"


class LineageRefused(Problem):
    """The trainer went back again since, or to another step."""

    status, code, title = 409, "lineage_conflict", "Lineage conflict"


class FeedRestarted(Problem):
    """The step was meant for another process of the feed, or for what it held before the trainer
    went back. Ask what this one holds, then repeat."""

    status, code, title = 412, "feed_restarted", "Feed was started anew"


class FeedBusy(Problem):
    """The feed takes no step now; the same PUT may succeed later."""

    status, code, title = 503, "feed_full", "Feed is full"


class UnknownStep(Problem):
    """The feed neither holds the step nor remembers it."""

    status, code, title = 404, "unknown_step", "Unknown step"


CONFLICT_CODES: Final[dict[type[StepRefused], str]] = {
    OtherRunStep: "other_run",
    OtherGridStep: "other_grid",
    StepConflict: "step_conflict",
    StepOutOfOrder: "step_out_of_order",
    FeedEnded: "feed_ended",
}


@contextmanager
def as_problems() -> Iterator[None]:
    """Raise the library's refusals of a step as problems."""
    try:
        yield
    except UnreadableStep as exc:
        raise StepMalformed(str(exc), code="unreadable_step", version=exc.version) from exc
    except MalformedStep as exc:
        raise StepMalformed(str(exc), element=exc.element, rule=exc.rule) from exc
    except FeedFull as exc:
        raise FeedBusy(
            str(exc), headers=RETRY_LATER, steps_held=exc.held, blocking=list(exc.blocking)
        ) from exc
    except FeedPaused as exc:
        raise FeedBusy(
            str(exc), code="feed_paused", title="Feed is paused", headers=RETRY_LATER
        ) from exc
    except LineageConflict as exc:
        raise LineageRefused(str(exc), lineage=exc.known[0], step=exc.known[1]) from exc
    except OtherLineageStep as exc:
        raise FeedRestarted(str(exc), lineage=exc.expected) from exc
    except StepOutOfOrder as exc:
        code = CONFLICT_CODES[type(exc)]
        raise StepConflicts(str(exc), code=code, step=exc.step, expected=exc.expected) from exc
    except StepRefused as exc:
        raise StepConflicts(str(exc), code=CONFLICT_CODES[type(exc)], step=exc.step) from exc
