"""A rank's side of the protocol as a state machine: no socket, no thread, no clock of its own.

``due`` says what to send now, ``on_message`` takes what came. The owner moves the frames
(``link.py``) and waits on what the session shows: arrived micro batches, the released place, the
committed step, the error. Not thread-safe: its owner locks.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from sideband.errors import SidebandError
from sideband.feed.errors import MalformedFrame, RankRefused, StepFailed, StepMissing
from sideband.feed.facts import FIRST, Place, after
from sideband.feed.frames import Frame
from sideband.feed.messages import (
    AbortMessage,
    ByeMessage,
    CommitMessage,
    CommittedMessage,
    EndMessage,
    FailMessage,
    Header,
    HelloMessage,
    MicroBatchMessage,
    PingMessage,
    PongMessage,
    ProgressMessage,
    RefusedMessage,
    ReleaseMessage,
    ResyncMessage,
    WelcomeMessage,
    shortened,
)

REPEAT_S: Final = 1.0  # HELLO, COMMIT and FAIL are repeated until they are answered; PING always
HELLO_AGAIN_S: Final = 0.05
FIRST_HELLO_S: Final = float("-inf")


class Arrived(NamedTuple):
    """A micro batch as it came, the ``seq``-th of the ``welcome_count``-th welcome."""

    message: MicroBatchMessage
    body: Frame
    seq: int
    welcome_count: int


@dataclass(slots=True, kw_only=True, eq=False)
class RankSession:
    """``hello`` is what the rank says of itself; its committed and resume places are kept here."""

    hello: HelloMessage
    peer_timeout_s: float
    committed: int | None = None
    at: Place | None = None  # the next place to receive; None: whatever is first
    lineage: int | None = None  # of the micro batches that came; None before the first
    read: Place = FIRST
    released: Place = FIRST
    arrived: deque[Arrived] = field(default_factory=deque)
    welcome: WelcomeMessage | None = None
    error: SidebandError | None = None
    is_ended: bool = False
    is_aborted: bool = False
    refusal: str = ""  # the last that may be repeated
    waiting_for: tuple[int, ...] = ()
    wanted_commit: int | None = None
    wanted_fail: tuple[int, str] | None = None
    _is_joined: bool = False
    _welcome_count: int = 0
    _seq: int = 0
    _taken: int = 0  # of this welcome: how many left the queue
    _told_taken: int = 0
    _told_read: Place = FIRST
    _hello_after_s: float = FIRST_HELLO_S
    _ping_after_s: float = FIRST_HELLO_S
    _repeat_after_s: float = FIRST_HELLO_S
    _heard_s: float | None = None

    def __post_init__(self) -> None:
        self.committed = self.hello.committed_step
        self.at = None if self.committed is None else (self.committed + 1, 0)

    def is_silent(self, *, now_s: float) -> bool:
        """The feed said nothing for too long: the owner connects anew and calls ``rejoin``."""
        if self._heard_s is None:
            self._heard_s = now_s
        return now_s - self._heard_s > self.peer_timeout_s

    def rejoin(self, *, now_s: float) -> None:
        """The connection is a new one."""
        self._leave(now_s=now_s)
        self._heard_s = now_s

    def greet_soon(self, *, now_s: float) -> None:
        """A greeting did not get out, or another is needed: soon, but not in a tight loop."""
        self._hello_after_s = min(self._hello_after_s, now_s + HELLO_AGAIN_S)

    def due(self, *, now_s: float) -> list[Header]:
        """What to send now: greetings, signs of life, and what was not answered yet."""
        headers: list[Header] = []
        if not self._is_joined:
            if now_s >= self._hello_after_s and self.error is None:
                self._hello_after_s = now_s + REPEAT_S
                headers.append(self._greeting())
            return headers
        if self.has_progress:
            self._told_taken, self._told_read = self._taken, self.read
            headers.append(ProgressMessage(seq=self._taken, step=self.read[0], index=self.read[1]))
        if now_s >= self._ping_after_s:
            self._ping_after_s = now_s + REPEAT_S
            headers.append(PingMessage(run_id=self.run_id, global_rank=self.global_rank))
        if now_s >= self._repeat_after_s:
            self._repeat_after_s = now_s + REPEAT_S
            headers.extend(self._unanswered())
        return headers

    @property
    def has_progress(self) -> bool:
        """Whether ``due`` has something to say of what was read, or of half the credit taken.

        Others may wait for what is read. Credit that is told by halves keeps the feed sending while
        it saves most of the messages.
        """
        if not self._is_joined:
            return False
        untold = self._taken - self._told_taken
        return self._told_read < self.read or 2 * untold >= self.hello.credit

    def on_unsent(self, *, now_s: float) -> None:
        """What ``due`` gave did not get out: it is due again, a greeting soon."""
        self._told_taken, self._told_read = 0, FIRST
        self.greet_soon(now_s=now_s)

    def _greeting(self) -> HelloMessage:
        step, index = self.at if self.at is not None else (None, None)
        is_restored = self.committed == self.hello.committed_step  # nothing is committed since
        return msgspec.structs.replace(
            self.hello,
            committed_step=self.committed,
            committed_lineage=self.hello.committed_lineage if is_restored else self.lineage,
            resume_step=step,
            resume_index=index,
            lineage=self.lineage,
        )

    def _unanswered(self) -> list[Header]:
        headers: list[Header] = []
        if self.wanted_commit is not None:
            headers.append(self._commit(self.wanted_commit))
        if self.wanted_fail is not None and not self.is_aborted:
            headers.append(self._fail(*self.wanted_fail))
        return headers

    @property
    def is_out(self) -> bool:
        """It failed and has no connection: it never says anything any more."""
        return self.error is not None and not self._is_joined

    @property
    def run_id(self) -> str | None:
        """The run, once the feed has said it or the trainer has demanded it."""
        return self.welcome.run_id if self.welcome is not None else self.hello.run_id

    @property
    def global_rank(self) -> int:
        """The rank's number, as the feed said it."""
        assert self.welcome is not None, "only a welcomed rank speaks in its own name"
        return self.welcome.global_rank

    def _commit(self, step: int) -> CommitMessage:
        assert self.run_id is not None, "a commit follows a welcome"
        return CommitMessage(
            run_id=self.run_id, global_rank=self.global_rank, step=step, lineage=self.lineage
        )

    def _fail(self, step: int, reason: str) -> FailMessage:
        assert self.run_id is not None, "a failure follows a welcome"
        rank = self.global_rank
        return FailMessage(run_id=self.run_id, global_rank=rank, step=step, reason=reason)

    # --- what the trainer's side does ------------------------------------------------------

    def take(self) -> Arrived:
        """The oldest arrived micro batch; ``due`` gives its credit back. Only when there is one."""
        arrived = self.arrived.popleft()
        if arrived.welcome_count == self._welcome_count:  # else its number is of an earlier one
            self._taken = arrived.seq
        return arrived

    def note_read(self, place: Place) -> None:
        """Everything before ``place`` is assembled; ``due`` says so."""
        self.read = place

    def want_commit(self, step: int) -> list[Header]:
        """Commit until the feed confirms: ``committed`` shows it."""
        self.wanted_commit = step
        return [self._commit(step)] if self._is_joined else []

    def want_fail(self, step: int, reason: str) -> list[Header]:
        """Tell the feed until it aborts the step."""
        self.wanted_fail = (step, shortened(reason))
        return self._unanswered() if self._is_joined else []

    def goodbye(self) -> list[Header]:
        """What to say last."""
        return [ByeMessage()] if self._is_joined else []

    # --- what the feed says ----------------------------------------------------------------

    def on_message(self, header: Header, body: Frame | None, *, now_s: float) -> list[Header]:
        """Take one message; the answers to send at once."""
        self._heard_s = now_s
        match header:
            case MicroBatchMessage():
                assert body is not None, "decode_message gives every chunk its body"
                return self._on_micro_batch(header, body, now_s=now_s)
            case ReleaseMessage():
                self.released = max(self.released, (header.step, header.index))
            case WelcomeMessage():
                return self._on_welcome(header)
            case RefusedMessage():
                self._on_refused(header, now_s=now_s)
            case ResyncMessage():
                self._leave(now_s=now_s)
            case CommittedMessage():
                self._on_committed(header.step)
            case AbortMessage():
                self.is_aborted = True
                self.error = self.error or StepFailed(header.step, header.reason)
            case PongMessage():
                self.waiting_for = header.waiting_for
            case EndMessage():
                self.is_ended = True
        return []

    def _on_committed(self, step: int) -> None:
        self.committed = max(self.committed or 0, step)
        if self.wanted_commit is not None and self.wanted_commit <= step:
            self.wanted_commit = None

    def _on_welcome(self, welcome: WelcomeMessage) -> list[Header]:
        if self.hello.run_id not in {None, welcome.run_id} or (
            self.welcome is not None and self.welcome.run_id != welcome.run_id
        ):
            self.error = RankRefused("other_run", f"the feed serves {welcome.run_id} now")
            return []
        if self.committed is None and welcome.committed_step is not None:
            self.committed = welcome.committed_step
            self.at = self.at or (welcome.committed_step + 1, 0)
        self.welcome, self._is_joined, self.refusal = welcome, True, ""
        self._welcome_count += 1
        self._seq = self._taken = self._told_taken = 0
        self._told_read = FIRST  # to the feed, what this process read before is news
        return self._unanswered()

    def _on_refused(self, refused: RefusedMessage, *, now_s: float) -> None:
        self._is_joined = False
        if refused.retry_after_s is not None:
            self._hello_after_s = now_s + refused.retry_after_s
            self.refusal = f"{refused.code}: {refused.reason}"
        elif self.error is None:
            self.error = RankRefused(refused.code, refused.reason)

    def _leave(self, *, now_s: float) -> None:
        self._is_joined = False
        self.greet_soon(now_s=now_s)

    def _on_micro_batch(
        self, message: MicroBatchMessage, body: Frame, *, now_s: float
    ) -> list[Header]:
        if message.index >= message.count or message.run_id != self.run_id:
            self.error = self.error or MalformedFrame("header", f"cannot be: {message}")
            return []
        if not self._is_joined:
            return []  # sent before the feed knew that this connection starts again
        if self.lineage not in {None, message.lineage}:
            why = f"got lineage {self.lineage}, the feed sends lineage {message.lineage} now"
            self.error = self.error or RankRefused("other_lineage", why)
            return []
        self._seq += 1
        if message.released is not None:
            self.released = max(self.released, message.released)
        place = (message.step, message.index)
        expected = self.at if self.at is not None else (message.step, 0)
        if place < expected:
            self._taken = self._seq  # a repeat: nothing that is kept came before it
            return []
        if place > expected and self._seq > 1:
            self._leave(now_s=now_s)  # something was lost on the way: start again from `at`
            return []
        if place > expected:
            self.error = self.error or StepMissing(expected=expected, got=place)
            return self.want_fail(message.step, str(self.error))
        self.at, self.lineage = after(place, message.count), message.lineage
        self.arrived.append(Arrived(message, body, self._seq, self._welcome_count))
        return []
