"""Kept turns of all workers: a session's lie with its worker, others where their request arrived.

A request id alone does not say where its turn is, so all are asked. An id that two workers know is
ambiguous, as it is in one; only a request that was plainly repeated is taken, the later one.
"""

import asyncio
from collections.abc import Sequence
from math import inf
from typing import Final

from xxhash import xxh3_128_digest

from services.inference_proxy.kept_turn import TurnRef
from services.inference_proxy.long_json import Parts
from services.inference_proxy.turn_problems import (
    TurnAmbiguous,
    TurnGone,
    TurnIncomplete,
    TurnOfOtherRun,
    TurnProblem,
    TurnRunning,
    TurnUnknown,
)
from services.inference_proxy.turn_source import OwnTurns, TurnsWanted
from services.inference_proxy.workers.asks import (
    AnyReply,
    Fetch,
    Known,
    NotGiven,
    Release,
    Released,
    Turns,
    TurnWord,
    Words,
)
from services.inference_proxy.workers.calls import Calls
from services.inference_proxy.workers.places import worker_of
from sideband.ids import RequestId

_KINDS: Final[dict[str, type[TurnProblem]]] = {
    kind.__name__: kind
    for kind in (TurnUnknown, TurnRunning, TurnOfOtherRun, TurnAmbiguous, TurnIncomplete)
}
FETCH_TIMEOUT_S: Final = 60.0  # of many large turns


def giver(words: Sequence[TurnWord], request_id: RequestId) -> int | None:
    """The worker that gives a turn, or knows why it cannot; None when none has heard of it.

    Raises TurnAmbiguous.
    """
    kept = {at: word.kept_at_s for at, word in enumerate(words) if word.kept_at_s is not None}
    gone = {at: word.gone_at_s for at, word in enumerate(words) if word.gone_at_s is not None}
    is_repeat = len({words[at].identity for at in kept}) <= 1
    # One that went before another came is history; one that went after it was beside it.
    is_history = not kept or max(gone.values(), default=-inf) < min(kept.values())
    if not is_repeat or not is_history or any(words[at].is_ambiguous for at in gone):
        raise TurnAmbiguous("two requests had this id", request_id=request_id)
    if kept:
        return max(kept, key=lambda at: kept[at])
    running = [at for at, word in enumerate(words) if word.is_running]
    latest = sorted(gone, key=lambda at: -gone[at])
    return next(iter([*running, *latest]), None)


def words_of(own: OwnTurns, request_ids: Sequence[RequestId]) -> list[TurnWord]:
    """What this worker knows of them. Reads the prompts of those it keeps."""
    words = []
    for request_id in request_ids:
        turn, gone, is_running = own.turns.known(request_id)
        identity = b""
        if turn is not None:
            named = f"{turn.session_id}\0{turn.run_id}\0".encode()
            identity = xxh3_128_digest(named + turn.prompt.tokens.tobytes())
        words.append(
            TurnWord(
                kept_at_s=None if turn is None else turn.at_s,
                identity=identity,
                gone_at_s=None if gone is None else gone.at_s,
                is_ambiguous=gone is not None and gone.reason == "ambiguous",
                is_running=is_running,
            )
        )
    return words


async def given(own: OwnTurns, wanted: TurnsWanted) -> Turns | NotGiven:
    """What another worker is told."""
    try:
        return Turns(await own.fetch(wanted))
    except TurnProblem as problem:
        return NotGiven(
            kind=type(problem).__name__,
            what=problem.what,
            reason=problem.reason if isinstance(problem, TurnGone) else None,
            request_id=problem.request_id,
            session_id=problem.session_id,
        )


class TeamTurns:
    """The turns of all workers, of which ``index`` is this one. Raises WorkerSilent too."""

    def __init__(self, own: OwnTurns, calls: Calls, *, index: int, workers: int) -> None:
        self._own, self._calls, self._index, self._workers = own, calls, index, workers

    async def fetch(self, wanted: TurnsWanted) -> list[Parts]:
        """The turns, encoded, in order. Raises a TurnProblem for the first that cannot be given."""
        if wanted.session_id is not None:
            worker = worker_of(wanted.session_id.encode(), self._workers)
            return await self._from(worker, wanted)
        ids = [ref.request_id for ref in wanted.refs]
        words = await asyncio.gather(*(self._words(at, ids) for at in range(self._workers)))
        places, problem = self._places(ids, list(zip(*words, strict=True)))
        encoded: dict[int, Parts] = {}
        faults: list[tuple[int, TurnProblem]] = []
        for worker in sorted(set(places)):
            numbers = [number for number, place in enumerate(places) if place == worker]
            refs = [wanted.refs[number] for number in numbers]
            try:
                turns = await self._from(worker, _of_refs(wanted, refs))
            except TurnProblem as exc:
                at = next(n for n in numbers if ids[n] == exc.request_id)
                faults.append((at, exc))
                continue
            encoded |= dict(zip(numbers, turns, strict=True))
        if faults:
            raise min(faults, key=lambda fault: fault[0])[1]
        if problem is not None:
            raise problem
        return [encoded[number] for number in range(len(ids))]

    async def release(self, wanted: TurnsWanted) -> int:
        """Let them go; how many choices went. Idempotent."""
        if wanted.session_id is not None:
            return await self._released(
                worker_of(wanted.session_id.encode(), self._workers), wanted
            )
        counts = await asyncio.gather(*(self._released(at, wanted) for at in range(self._workers)))
        return min(sum(counts), len(wanted.refs))  # a repeated request may have gone twice

    def _places(
        self, ids: Sequence[RequestId], words: Sequence[Sequence[TurnWord]]
    ) -> tuple[list[int], TurnProblem | None]:
        """Who gives each turn, up to the first that nobody can say of."""
        places: list[int] = []
        for request_id, of_one in zip(ids, words, strict=True):
            try:
                place = giver(of_one, request_id)
            except TurnAmbiguous as problem:
                return places, problem
            places.append(self._index if place is None else place)
        return places, None

    async def _words(self, worker: int, ids: list[RequestId]) -> list[TurnWord]:
        if worker == self._index:
            return words_of(self._own, ids)
        return (await self._calls.ask(worker, Words(ids), Known)).words

    async def _from(self, worker: int, wanted: TurnsWanted) -> list[Parts]:
        if worker == self._index:
            return await self._own.fetch(wanted)
        reply = await self._calls.ask_any(worker, Fetch(wanted), timeout_s=FETCH_TIMEOUT_S)
        return _turns_of(reply)

    async def _released(self, worker: int, wanted: TurnsWanted) -> int:
        if worker == self._index:
            return await self._own.release(wanted)
        return (await self._calls.ask(worker, Release(wanted), Released)).count


def _of_refs(wanted: TurnsWanted, refs: list[TurnRef]) -> TurnsWanted:
    return TurnsWanted(session_id=None, choice=wanted.choice, refs=refs, run_id=wanted.run_id)


def _turns_of(reply: AnyReply) -> list[Parts]:
    if isinstance(reply, NotGiven):
        raise _problem_of(reply)
    assert isinstance(reply, Turns), "a fetch gives turns or a problem"
    return reply.encoded


def _problem_of(reply: NotGiven) -> TurnProblem:
    if reply.kind == TurnGone.__name__:
        assert reply.reason is not None, "what is gone says why"
        return TurnGone(reply.reason, request_id=reply.request_id, session_id=reply.session_id)
    kind = _KINDS[reply.kind]
    return kind(reply.what, request_id=reply.request_id, session_id=reply.session_id)
