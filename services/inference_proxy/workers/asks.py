"""What workers ask each other, and what they answer: msgpack, one ask a connection.

The types are one closed set: what cannot be read is a bug, as all workers run the same code.
"""

from typing import Any

import msgspec

from services.inference_proxy.turn_problems import GoneReason
from services.inference_proxy.turn_source import TurnsWanted
from services.inference_proxy.workers.state import SharedState
from sideband.ids import RequestId


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Asked of a worker, or of the parent."""


class Adopt(Ask, frozen=True, tag=True):
    """Let this hold: Done."""

    state: SharedState


class Keep(Ask, frozen=True, tag=True):
    """To the parent: give it to every worker that begins from now on: Done."""

    state: SharedState


class End(Ask, frozen=True, tag=True):
    """To the parent: this worker does not follow; kill it and begin another one: Done."""

    index: int


class Drain(Ask, frozen=True, tag=True):
    """Take nothing new, finish what runs: Drained."""

    timeout_s: float


class Look(Ask, frozen=True, tag=True):
    """What goes on there: Seen."""

    sessions: int = 0  # of the latest, so many are wanted


class Scrape(Ask, frozen=True, tag=True):
    """Its metrics: Text."""


class Words(Ask, frozen=True, tag=True):
    """What is known of turns by these names: Known."""

    request_ids: list[RequestId]


class Fetch(Ask, frozen=True, tag=True):
    """Kept turns: Turns, or NotGiven."""

    wanted: TurnsWanted


class Release(Ask, frozen=True, tag=True):
    """Let kept turns go: Released."""

    wanted: TurnsWanted


class Reply(msgspec.Struct, frozen=True, tag=True):
    """Answered."""


class Done(Reply, frozen=True, tag=True):
    """It is so."""


class Drained(Reply, frozen=True, tag=True):
    """Whether nothing runs any more."""

    is_complete: bool


class Seen(Reply, frozen=True, kw_only=True, tag=True):
    """Of one worker. Views are as the admin routes show them."""

    in_flight: int
    not_ready: list[str]
    engines: list[dict[str, Any]]
    sessions: list[dict[str, Any]]  # the latest last
    session_count: int
    older: list[str]  # engines that were found to run older weights than the leader said
    naming: list[str]  # those that named their weights by a policy version once


class Text(Reply, frozen=True, tag=True):
    """As it is shown."""

    content: bytes


class TurnWord(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker knows of a request id. ``identity`` is equal for a repeated request.

    Times are monotonic, of the machine that all workers run on.
    """

    kept_at_s: float | None
    identity: bytes
    gone_at_s: float | None
    is_ambiguous: bool
    is_running: bool


class Known(Reply, frozen=True, tag=True):
    """In the order of the names."""

    words: list[TurnWord]


class Turns(Reply, frozen=True, tag=True):
    """Encoded, in the order wanted."""

    encoded: list[tuple[bytes, ...]]  # each in parts


class NotGiven(Reply, frozen=True, kw_only=True, tag=True):
    """A TurnProblem by the name of its kind; ``reason`` of one that is gone."""

    kind: str
    what: str
    reason: GoneReason | None
    request_id: str | None
    session_id: str | None


class Released(Reply, frozen=True, tag=True):
    """How many choices."""

    count: int


AnyAsk = Adopt | Keep | End | Drain | Look | Scrape | Words | Fetch | Release
AnyReply = Done | Drained | Seen | Text | Known | Turns | NotGiven | Released
ASKS: msgspec.msgpack.Decoder[AnyAsk] = msgspec.msgpack.Decoder(AnyAsk)
REPLIES: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)
