"""What the proxy knows of each session: its policy version, its tokens, the rows it was given.

Pure state without I/O, bounded in sessions and in tokens. A session's *branches* are the token
sequences of its delivered turns; a follow-up turn asks only for rows that the branch sharing most
of its prompt does not have yet. Forgetting tokens costs rows that are asked for again, never
correctness; the pinned version outlives the tokens.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.inference_proxy.limits import BRANCHES_MAX, SESSION_FILES_MAX
from sideband.ids import RequestId, SessionId

Tokens = NDArray[np.int32]


class VersionChanged(Exception):
    """A session is pinned to one policy version and a request names another."""

    def __init__(self, session: SessionId, *, pinned: int, asked: int) -> None:
        self.session, self.pinned, self.asked = session, pinned, asked
        super().__init__(f"session {session} runs at v{pinned}; a request asks for v{asked}")


@dataclass(slots=True, eq=False)
class Branch:
    """Tokens of a delivered turn; rows at positions [0, covered) were delivered and are valid."""

    tokens: Tokens
    covered: int


@dataclass(frozen=True, slots=True, eq=False)
class LastTurn:
    """The turn delivered last, and the branches before it: in case it never arrived."""

    request_id: RequestId
    prompt: Tokens
    before: list[Branch]


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One rollout as the proxy sees it. ``is_discarded`` once it was deleted under a request."""

    session_id: SessionId
    policy_version: int
    branches: list[Branch] = field(default_factory=list)  # the least recently delivered first
    last: LastTurn | None = None
    files: dict[str, None] = field(default_factory=dict)  # in order
    turns_delivered: int = 0
    in_flight: int = 0
    is_discarded: bool = False
    on_discard: set[Callable[[], None]] = field(default_factory=set)  # cancels its requests

    @property
    def tokens(self) -> int:
        """Tokens remembered."""
        return sum(len(branch.tokens) for branch in self.branches)

    def prompt_start(self, prompt: Tokens) -> int:
        """The first prompt row that no delivered turn gave.

        The branch with the longest shared prefix d decides, as it does in the orchestrator, which
        takes rows [0, d) from it; among equals the one that has least. So the start is at most
        min(d, tokens of that turn − 1).
        """
        shared = [(common_prefix(prompt, branch.tokens), branch) for branch in self.branches]
        longest = max((d for d, _ in shared), default=0)
        return min((min(d, branch.covered) for d, branch in shared if d == longest), default=0)

    def retract(self, request_id: RequestId, prompt: Tokens) -> None:
        """Forget the last turn if this is the same request again: its answer was lost on the way.

        Only its rows are asked for again; its file stays with the session, since the client may
        have it after all.
        """
        last = self.last
        if last is None or last.request_id != request_id or not np.array_equal(last.prompt, prompt):
            return
        self.branches, self.last = last.before, None
        self.turns_delivered -= 1

    def deliver(
        self,
        request_id: RequestId,
        prompt: Tokens,
        turns: Iterable[tuple[Tokens, int]],
        files: Iterable[str],
    ) -> None:
        """Remember a delivered turn: per choice all its tokens and how far they are covered."""
        self.turns_delivered += 1
        self.last = LastTurn(request_id, prompt, self.branches)
        self.branches = list(self.branches)
        for tokens, covered in turns:
            self.branches = [
                branch
                for branch in self.branches
                if common_prefix(tokens, branch.tokens) < len(branch.tokens)
            ]
            self.branches.append(Branch(tokens, covered))
        del self.branches[:-BRANCHES_MAX]
        for file in files:
            self.files.setdefault(file)
        while len(self.files) > SESSION_FILES_MAX:
            del self.files[next(iter(self.files))]


class SessionBook:
    """Sessions by id, least recently used first."""

    def __init__(self, *, sessions_max: int, tokens_max: int) -> None:
        self._sessions: OrderedDict[SessionId, Session] = OrderedDict()
        self._with_tokens: OrderedDict[SessionId, Session] = OrderedDict()
        self._sessions_max, self._tokens_max = sessions_max, tokens_max
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    @property
    def tokens(self) -> int:
        """Tokens remembered over all sessions."""
        return self._tokens

    def get(self, session_id: SessionId) -> Session | None:
        """The session, without touching its place in the order."""
        return self._sessions.get(session_id)

    def enter(self, session_id: SessionId, *, asked: int | None, applied: int) -> Session:
        """The session of a request, pinned at first sight: to ``asked``, else to ``applied``.

        Raises VersionChanged when it is pinned to another version than ``asked``.
        """
        session = self._sessions.get(session_id)
        if session is None:
            version = applied if asked is None else asked
            session = Session(session_id=session_id, policy_version=version)
            self._sessions[session_id] = session
        elif asked is not None and asked != session.policy_version:
            raise VersionChanged(session_id, pinned=session.policy_version, asked=asked)
        self._sessions.move_to_end(session_id)
        self._shrink(keep=session_id)
        return session

    def retract(self, session: Session, request_id: RequestId, prompt: Tokens) -> None:
        """Forget a session's last turn if this is the same request again."""
        with self._counted(session):
            session.retract(request_id, prompt)

    def deliver(
        self,
        session: Session,
        request_id: RequestId,
        prompt: Tokens,
        turns: Sequence[tuple[Tokens, int]],
        files: Iterable[str],
    ) -> None:
        """Remember a delivered turn, then forget what no longer fits."""
        with self._counted(session):
            session.deliver(request_id, prompt, turns, files)
        self._shrink(keep=session.session_id)

    @contextmanager
    def _counted(self, session: Session) -> Iterator[None]:
        """Keeps the count of tokens right over a change of ``session``."""
        before = session.tokens
        yield
        if self._sessions.get(session.session_id) is session:
            self._tokens += session.tokens - before
            self._with_tokens[session.session_id] = session
            self._with_tokens.move_to_end(session.session_id)

    def discard(self, session_id: SessionId) -> Session | None:
        """Take a session out; requests of it that still run are told by ``is_discarded``."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.is_discarded = True
            self._forget_tokens(session)
            for tell in list(session.on_discard):
                tell()
        return session

    def _shrink(self, *, keep: SessionId) -> None:
        while len(self._sessions) > self._sessions_max:
            idle = (s for s in self if s.session_id != keep and not s.in_flight)
            oldest = next(idle, None)
            if oldest is None:  # all are at work: the bound holds again once one of them ends
                return
            self._forget_tokens(oldest)
            del self._sessions[oldest.session_id]
        while self._tokens > self._tokens_max:
            oldest = next((s for s in self._with_tokens.values() if s.session_id != keep), None)
            if oldest is None:
                return
            self._forget_tokens(oldest)

    def _forget_tokens(self, session: Session) -> None:
        self._tokens -= session.tokens
        session.branches, session.last = [], None
        self._with_tokens.pop(session.session_id, None)


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Number of leading tokens that both share."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size


def covered_until(prompt_start: int, ranges: Iterable[tuple[int, int]]) -> int:
    """How far positions from 0 on are covered by [0, prompt_start) and ascending ``ranges``."""
    reached = prompt_start
    for start, stop in ranges:
        if start > reached:
            break
        reached = max(reached, stop)
    return reached
