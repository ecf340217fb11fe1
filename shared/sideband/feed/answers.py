"""What the feed answers to a rank's message: translation between frames and ``Delivery``.

Synchronous and without a socket, so that every frame can be tested on its own.
"""

from collections.abc import Sequence

from sideband.feed.delivery import Delivery
from sideband.feed.errors import MalformedFrame, RankRefused, UnsupportedProtocol
from sideband.feed.facts import Hello
from sideband.feed.frames import Frame, decode_message
from sideband.feed.limits import WAITING_FOR_MAX
from sideband.feed.messages import (
    FROM_RANK,
    PROTOCOL_VERSION,
    AbortMessage,
    ByeMessage,
    CommitMessage,
    CommittedMessage,
    FailMessage,
    Header,
    HelloMessage,
    PingMessage,
    PongMessage,
    ProgressMessage,
    RefusedMessage,
    ResyncMessage,
    WelcomeMessage,
    shortened,
)
from sideband.feed.observer import FeedObserver
from sideband.ids import RunId


class Answerer:
    """Feeds messages to the machine and says what goes back at once."""

    def __init__(self, delivery: Delivery, observer: FeedObserver) -> None:
        self._delivery, self._observer = delivery, observer

    def answers(self, connection: bytes, frames: Sequence[Frame], *, now_s: float) -> list[Header]:
        """The answers to one message. Never raises: bad frames and refusals are REFUSED."""
        try:
            header, _ = decode_message(frames, FROM_RANK)
            return self._answer(connection, header, now_s=now_s)
        except MalformedFrame as exc:
            refusal = RankRefused("malformed", str(exc))
        except UnsupportedProtocol as exc:
            refusal = RankRefused("unsupported_protocol", str(exc))
        except RankRefused as exc:
            refusal = exc
        self._observer.rank_refused(refusal.code, refusal.reason)
        return [
            RefusedMessage(
                code=refusal.code,
                reason=shortened(refusal.reason),
                retry_after_s=refusal.retry_after_s,
            )
        ]

    def _answer(self, connection: bytes, header: Header, *, now_s: float) -> list[Header]:
        match header:
            case ProgressMessage():  # first, as nearly all that comes is this
                return self._progress(connection, header, now_s=now_s)
            case HelloMessage():
                return [self._welcome(connection, header, now_s=now_s)]
            case CommitMessage():
                self._check_run(header.run_id)
                return [self._commit(connection, header, now_s=now_s)]
            case ByeMessage():
                rank = self._delivery.leave(connection)
                if rank is not None:
                    self._observer.rank_left(rank, is_lost=False)
                return []
        rank = self._delivery.rank_of(connection, now_s=now_s)
        if rank is None:
            return [ResyncMessage()]
        match header:
            case FailMessage():
                self._check_run(header.run_id)
                self._delivery.fail(rank, header.step, header.reason)
            case PingMessage():
                return [self._pong()]
        return []

    def _progress(
        self, connection: bytes, message: ProgressMessage, *, now_s: float
    ) -> list[Header]:
        rank = self._delivery.rank_of(connection, now_s=now_s)
        if rank is None:
            return [ResyncMessage()]
        self._delivery.progress(rank, seq=message.seq, read=(message.step, message.index))
        return []

    def _welcome(self, connection: bytes, message: HelloMessage, *, now_s: float) -> WelcomeMessage:
        rank = self._delivery.hello(connection, self._hello_of(message), now_s=now_s)
        self._observer.rank_joined(rank)
        plan, committed = self._delivery.plan, self._delivery.committed.get(rank.global_rank)
        return WelcomeMessage(
            run_id=plan.run_id,
            global_rank=rank.global_rank,
            dp_size=plan.dp_size,
            cp_size=plan.cp_size,
            layout=plan.layout,
            rank_count=plan.rank_count,
            generation=self._delivery.generation,
            # What processes of before may have said is nothing to begin from.
            committed_step=None if self._delivery.is_untold else committed,
        )

    def _hello_of(self, message: HelloMessage) -> Hello:
        if message.protocol != PROTOCOL_VERSION:
            reason = f"the rank speaks {message.protocol}, the feed {PROTOCOL_VERSION}"
            raise RankRefused("unsupported_protocol", reason)
        plan, global_rank = self._delivery.plan, message.global_rank
        if global_rank is None:
            if plan.rank_count != plan.dp_size * plan.cp_size:
                reason = "ranks have tensor or pipeline siblings here: give the global rank"
                raise RankRefused("unknown_rank", reason)
            global_rank = message.dp_rank * plan.cp_size + message.cp_rank
        resume = None
        if message.resume_step is not None and message.resume_index is not None:
            resume = (message.resume_step, message.resume_index)
        return Hello(
            instance=message.instance,
            run_id=None if message.run_id is None else RunId(message.run_id),
            global_rank=global_rank,
            dp_rank=message.dp_rank,
            cp_rank=message.cp_rank,
            committed_step=message.committed_step,
            resume=resume,
            lineage=message.lineage,
            committed_lineage=message.committed_lineage,
            credit=message.credit,
            model=message.model,
        )

    def _check_run(self, run_id: str) -> None:
        expected = self._delivery.plan.run_id
        if run_id != expected:
            raise RankRefused("other_run", f"this feed serves {expected}, not {run_id}")

    def _commit(
        self, connection: bytes, message: CommitMessage, *, now_s: float
    ) -> CommittedMessage | AbortMessage:
        rank_count = self._delivery.plan.rank_count
        if message.global_rank >= rank_count:
            reason = f"global_rank is {message.global_rank}, must lie in [0, {rank_count})"
            raise RankRefused("unknown_rank", reason)
        self._delivery.rank_of(connection, now_s=now_s)  # a sign of life, where it is the rank's
        abort = self._delivery.commit(message.global_rank, message.step, lineage=message.lineage)
        if abort is not None:
            return AbortMessage(step=abort.step, reason=abort.reason)
        return CommittedMessage(step=message.step)

    def _pong(self) -> PongMessage:
        return PongMessage(
            committed_step=self._delivery.committed_step,
            waiting_for=self._delivery.waiting_for()[:WAITING_FOR_MAX],
        )
