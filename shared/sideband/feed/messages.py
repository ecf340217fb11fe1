"""ZMQ messages between feed and rank: docs/feed-protocol.md section 3.

Every bound is part of the type, so that a header is refused as a whole or right as a whole.
``frames.py`` has their bytes.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from sideband.batch.types import Layout
from sideband.feed.facts import Place
from sideband.feed.limits import (
    MICRO_BATCHES_MAX,
    RANKS_MAX,
    REASON_CHARS_MAX,
    STEP_MAX,
    WAITING_FOR_MAX,
)
from sideband.model import ModelShape
from sideband.segments import Field

PROTOCOL_VERSION: Final = 4

# "$" would admit a trailing newline.
Id = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._:-]{1,128}\Z")]
Reason = Annotated[str, Meta(max_length=REASON_CHARS_MAX)]
StepNumber = Annotated[int, Meta(ge=0, le=STEP_MAX)]
LineageNumber = Annotated[int, Meta(ge=0, le=STEP_MAX)]  # how often the trainer went back
Index = Annotated[int, Meta(ge=0, le=MICRO_BATCHES_MAX)]
Rank = Annotated[int, Meta(ge=0, lt=RANKS_MAX)]
Sequence64 = Annotated[int, Meta(ge=0, le=1 << 62)]


class Header(msgspec.Struct, frozen=True, gc=False):
    """Root of all headers. They hold no cycles, so the collector need not look at them."""


class HelloMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank joins, or joins again. ``lineage``: of what this process got, None before that.

    ``committed_lineage``: in which ``committed_step`` was trained; None where nobody kept it.
    """

    protocol: Annotated[int, Meta(ge=0, le=255)] = PROTOCOL_VERSION
    instance: Id
    run_id: Id | None = None
    global_rank: Rank | None = None  # None: dp_rank × cp_size + cp_rank, where that is enough
    dp_rank: Rank
    cp_rank: Rank
    committed_step: StepNumber | None = None
    committed_lineage: LineageNumber | None = None
    resume_step: StepNumber | None = None
    resume_index: Index | None = None
    lineage: LineageNumber | None = None
    credit: Annotated[int, Meta(ge=0, le=1 << 16)]
    model: ModelShape | None = None


class ProgressMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``seq`` micro batches left the queue, everything before this place is read."""

    seq: Sequence64
    step: StepNumber
    index: Index


class CommitMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimizer step is done. Any connection may send it. ``lineage``: of the step."""

    run_id: Id
    global_rank: Rank
    step: StepNumber
    lineage: LineageNumber | None = None


class FailMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rank cannot go on with ``step``."""

    run_id: Id
    global_rank: Rank
    step: StepNumber
    reason: Reason


class PingMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Alive."""

    run_id: Id | None = None
    global_rank: Rank


class ByeMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rank leaves."""


class WelcomeMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rank has joined."""

    run_id: Id
    global_rank: Rank
    dp_size: Rank
    cp_size: Rank
    layout: Layout
    rank_count: Annotated[int, Meta(ge=1, le=RANKS_MAX)]
    generation: Annotated[int, Meta(ge=1)]
    committed_step: StepNumber | None = None


class RefusedMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rank has not joined; with ``retry_after_s`` it may ask again."""

    code: Id
    reason: Reason
    retry_after_s: float | None = None


class MicroBatchMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One micro batch and its chunk. ``released``, where it is told: all have read what is before.

    Its bytes are those of ``frames.py``, not of this type.
    """

    run_id: Id
    lineage: LineageNumber
    step: StepNumber
    index: Index
    count: Annotated[int, Meta(ge=1, le=MICRO_BATCHES_MAX)]
    fields: tuple[Field, ...]
    released: Place | None = None
    model: ModelShape | None = None


class ReleaseMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every rank has read everything before this place."""

    step: StepNumber
    index: Index


class CommittedMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The commit is recorded."""

    step: StepNumber


class AbortMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The step failed."""

    step: StepNumber
    reason: Reason


class PongMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to PING: what the feed has and waits for."""

    committed_step: StepNumber | None = None
    waiting_for: Annotated[tuple[Rank, ...], Meta(max_length=WAITING_FOR_MAX)] = ()


class EndMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing follows ``last_step``."""

    last_step: StepNumber


class ResyncMessage(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The feed does not know this connection."""


FROM_RANK: Final[dict[int, type[Header]]] = {
    1: HelloMessage,
    2: ProgressMessage,
    4: CommitMessage,
    5: FailMessage,
    6: PingMessage,
    7: ByeMessage,
}
FROM_FEED: Final[dict[int, type[Header]]] = {
    33: WelcomeMessage,
    34: RefusedMessage,
    35: MicroBatchMessage,
    36: ReleaseMessage,
    37: CommittedMessage,
    38: AbortMessage,
    39: PongMessage,
    40: EndMessage,
    41: ResyncMessage,
}


def shortened(reason: str) -> str:
    """A reason that fits its field."""
    return reason if len(reason) <= REASON_CHARS_MAX else reason[: REASON_CHARS_MAX - 1] + "…"
