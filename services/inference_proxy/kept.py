"""Train turns kept for clients that hand a rollout in by request ids, or by its session.

Pure state, bounded in turns, bytes and age; the oldest go first. A turn that went, for whatever
reason, is remembered by name for a while, so that nobody takes "gone" for "never was", and a
session that lost a turn is never handed in without it.

Errors: TurnProblem and its kinds (``turn_problems``).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from services.inference_proxy.kept_turn import Found, KeptTurn, TurnRef
from services.inference_proxy.recording import TurnChoice
from services.inference_proxy.turn_problems import (
    GoneReason,
    TurnAmbiguous,
    TurnGone,
    TurnOfOtherRun,
    TurnProblem,
    TurnRunning,
    TurnUnknown,
)
from sideband.ids import RequestId, RunId, SessionId

Reason = GoneReason | Literal["ambiguous"]
K = TypeVar("K")


class Gone(NamedTuple):
    """Why a turn cannot be given any more, and since when."""

    reason: Reason
    at_s: float


@dataclass(slots=True, eq=False)
class _Session:
    """A session's turns in the order in which they were answered."""

    request_ids: dict[RequestId, None] = field(default_factory=dict)
    lost: Reason | None = None  # one of them cannot be given any more


class KeptTurns:
    """Turns by request id. ``clock_s`` is monotonic."""

    def __init__(
        self, *, turns_max: int, bytes_max: int, age_s_max: float, clock_s: Callable[[], float]
    ) -> None:
        self._turns_max, self._bytes_max, self._age_s_max = turns_max, bytes_max, age_s_max
        self._clock_s = clock_s
        self._turns: OrderedDict[RequestId, KeptTurn] = OrderedDict()  # the oldest first
        self._sessions: OrderedDict[SessionId, _Session] = OrderedDict()
        self._gone: OrderedDict[RequestId, Gone] = OrderedDict()
        self._running: dict[RequestId, int] = {}
        self._running_sessions: dict[SessionId, int] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def is_on(self) -> bool:
        """Whether turns are kept at all."""
        return self._turns_max > 0

    def running(self, request_id: RequestId, session_id: SessionId | None) -> "Running":
        """A train request that is being answered, while the block runs."""
        return Running(self, request_id, session_id)

    def begin(self, request_id: RequestId, session_id: SessionId | None) -> None:
        """It is being answered from here on."""
        _increase(self._running, request_id)
        if session_id is not None:
            _increase(self._running_sessions, session_id)

    def end(self, request_id: RequestId, session_id: SessionId | None) -> None:
        """It is not any more."""
        _decrease(self._running, request_id)
        if session_id is not None:
            _decrease(self._running_sessions, session_id)

    def put(self, turn: KeptTurn) -> None:
        """Keep an answered turn.

        The same request again (id, session and prompt) is a client that did not get the first
        answer: the new one stands. Any other request of the same id makes the id ambiguous.
        """
        if not self.is_on:
            return
        before = self._turns.get(turn.request_id)
        if before is not None and not _is_repeat(before, turn):
            self._drop(before, "ambiguous")
            self._lose(turn.session_id, "ambiguous")
            return
        gone = self._gone.get(turn.request_id)
        if gone is not None and gone.reason == "ambiguous":
            self._lose(turn.session_id, "ambiguous")
            return
        if before is not None:
            self._take_out(before)
        size_bytes = turn.size_bytes
        if size_bytes > self._bytes_max:
            self._remember_gone(turn, "too_large")
            return
        self._gone.pop(turn.request_id, None)
        self._turns[turn.request_id] = turn
        self.size_bytes += size_bytes
        if turn.session_id is not None:
            session = self._sessions.setdefault(turn.session_id, _Session())
            session.request_ids.pop(turn.request_id, None)
            session.request_ids[turn.request_id] = None
            self._sessions.move_to_end(turn.session_id)
        self.expire()

    def find(self, refs: Sequence[TurnRef], *, run_id: RunId | None) -> Found:
        """The turns in the order of ``refs``."""
        self.expire()
        turns: list[tuple[RequestId, TurnChoice]] = []
        for ref in refs:
            try:
                turns.append((ref.request_id, self._one(ref, run_id)))
            except TurnProblem as problem:
                return Found(turns, problem)
        return Found(turns)

    def find_session(self, session_id: SessionId, *, choice: int, run_id: RunId | None) -> Found:
        """Every turn of a session in the order in which they were answered.

        Raises a TurnProblem, also when one of its turns cannot be given.
        """
        self.expire()
        if session_id in self._running_sessions:
            raise TurnRunning("a turn is being answered", request_id=None, session_id=session_id)
        session = self._sessions.get(session_id)
        if session is None:
            raise TurnUnknown("no turn is kept", request_id=None, session_id=session_id)
        if session.lost == "ambiguous":
            what = "two of its requests had the same id"
            raise TurnAmbiguous(what, request_id=None, session_id=session_id)
        if session.lost is not None:
            raise TurnGone(session.lost, request_id=None, session_id=session_id)
        refs = [TurnRef(request_id=each, choice=choice) for each in session.request_ids]
        return self.find(refs, run_id=run_id)

    def release(self, refs: Sequence[TurnRef]) -> int:
        """What was handed in durably may go; the number of choices that went. Idempotent."""
        count = 0
        for ref in refs:
            turn = self._turns.get(ref.request_id)
            if turn is None or ref.choice not in turn.choices:
                continue
            count += 1
            self.size_bytes -= turn.size_bytes
            del turn.choices[ref.choice]
            self.size_bytes += turn.size_bytes
            if not turn.choices:
                self._drop(turn, "released")
        return count

    def release_session(self, session_id: SessionId, *, choice: int) -> int:
        """The same for a session's turns."""
        session = self._sessions.get(session_id)
        ids = list(session.request_ids) if session else []
        return self.release([TurnRef(request_id=each, choice=choice) for each in ids])

    def discard_session(self, session_id: SessionId) -> None:
        """Forget a session's turns: nobody will train on them."""
        session = self._sessions.get(session_id)
        for request_id in list(session.request_ids) if session else []:
            self._drop(self._turns[request_id], "discarded")

    def known(self, request_id: RequestId) -> tuple[KeptTurn | None, Gone | None, bool]:
        """The turn if it is kept, why it is gone if it is, and whether one is being answered."""
        self.expire()
        return (
            self._turns.get(request_id),
            self._gone.get(request_id),
            request_id in self._running,
        )

    def expire(self) -> None:
        """Let go of what is too old or too much, the oldest first."""
        limit_s = self._clock_s() - self._age_s_max
        while self._turns:
            oldest = next(iter(self._turns.values()))
            is_over = len(self._turns) > self._turns_max or self.size_bytes > self._bytes_max
            if not is_over and oldest.at_s > limit_s:
                return
            self._drop(oldest, "expired")

    def _one(self, ref: TurnRef, run_id: RunId | None) -> TurnChoice:
        turn = self._turns.get(ref.request_id)
        if turn is None:
            raise self._missing(ref.request_id)
        if run_id is not None and turn.run_id is not None and turn.run_id != run_id:
            what = f"belongs to run {turn.run_id}, not {run_id}"
            raise TurnOfOtherRun(what, request_id=ref.request_id)
        if ref.choice not in turn.choices:
            what = f"has no choice {ref.choice}, or it was released"
            raise TurnUnknown(what, request_id=ref.request_id)
        return turn.choices[ref.choice]

    def _missing(self, request_id: RequestId) -> TurnProblem:
        gone = self._gone.get(request_id)
        if request_id in self._running:
            return TurnRunning("is being answered", request_id=request_id)
        if gone is None:
            return TurnUnknown("no such train request is known", request_id=request_id)
        if gone.reason == "ambiguous":
            return TurnAmbiguous("two requests had this id", request_id=request_id)
        return TurnGone(gone.reason, request_id=request_id)

    def _drop(self, turn: KeptTurn, reason: Reason) -> None:
        self._take_out(turn)
        self._remember_gone(turn, reason)

    def _take_out(self, turn: KeptTurn) -> None:
        del self._turns[turn.request_id]
        self.size_bytes -= turn.size_bytes

    def _remember_gone(self, turn: KeptTurn, reason: Reason) -> None:
        self._gone.pop(turn.request_id, None)
        self._gone[turn.request_id] = Gone(reason, self._clock_s())
        if len(self._gone) > self._turns_max:
            self._gone.popitem(last=False)
        session = self._sessions.get(turn.session_id) if turn.session_id else None
        if session is not None:
            session.request_ids.pop(turn.request_id, None)
        self._lose(turn.session_id, reason)

    def _lose(self, session_id: SessionId | None, reason: Reason) -> None:
        if session_id is None:
            return
        session = self._sessions.setdefault(session_id, _Session())
        session.lost = session.lost or reason
        # A session without turns is only a memory of what was lost: the oldest are forgotten.
        while len(self._sessions) > 2 * self._turns_max:
            empty = next((key for key, s in self._sessions.items() if not s.request_ids), None)
            if empty is None:
                return
            del self._sessions[empty]


class Running:
    """Tells the store of a request that is being answered."""

    __slots__ = ("_request_id", "_session_id", "_turns")

    def __init__(
        self, turns: KeptTurns, request_id: RequestId, session_id: SessionId | None
    ) -> None:
        self._turns, self._request_id, self._session_id = turns, request_id, session_id

    def __enter__(self) -> None:
        self._turns.begin(self._request_id, self._session_id)

    def __exit__(self, *_: object) -> None:
        self._turns.end(self._request_id, self._session_id)


def _is_repeat(before: KeptTurn, turn: KeptTurn) -> bool:
    is_same = (before.session_id, before.run_id) == (turn.session_id, turn.run_id)
    return is_same and before.prompt.same_as(turn.prompt)


def _increase(counts: dict[K, int], key: K) -> None:
    counts[key] = counts.get(key, 0) + 1


def _decrease(counts: dict[K, int], key: K) -> None:
    left = counts.pop(key) - 1
    if left:
        counts[key] = left
