"""The orchestrator's view of the trainer feed. Foreign errors become ours here, once.

FeedCallFailed          the feed did not answer, or says "later": try again
├── FeedBusy            it is full or paused; says when to come again
└── FeedBehind          it does not know, or not yet, how often the trainer went back
StepRejected            it will never take this step
"""

from typing import Final, TypeVar

import httpx
import msgspec

from services.orchestrator.limits import DETAIL_CHARACTERS_MAX
from sideband.feed.ancestry import Line
from sideband.feed.codec import STEP_CONTENT_TYPE

T = TypeVar("T", bound=msgspec.Struct)
LATER_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


class FeedCallFailed(Exception):
    """No usable answer. Repeating is safe: every call is idempotent."""


class FeedBusy(FeedCallFailed):
    """The feed holds as many steps as it may."""

    def __init__(self, detail: str, *, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(detail)


class FeedBehind(FeedCallFailed):
    """What it holds and what was committed is of another lineage: it means nothing here."""

    def __init__(self, lineage: int, *, expected: int) -> None:
        self.lineage, self.expected = lineage, expected
        super().__init__(f"the feed knows lineage {lineage}, the run's is {expected}")


class StepRejected(Exception):
    """The feed refuses the step for good: another run, grid or content."""

    def __init__(self, step: int, *, status: int, code: str, detail: str) -> None:
        self.step, self.status, self.code, self.detail = step, status, code, detail
        super().__init__(f"the feed refused step {step} ({status} {code}): {detail}")


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A step that a rank gave up; it stands until every rank has come back."""

    step: int
    global_rank: int
    reason: str


class RankCommit(msgspec.Struct, frozen=True, kw_only=True):
    """The last step that one global rank has committed."""

    global_rank: int
    committed_step: int


class Acknowledgements(msgspec.Struct, frozen=True, kw_only=True):
    """``committed_step``: every global rank has committed it and all before.

    ``ranks`` are the first thousand that have committed anything.
    """

    run_id: str
    committed_step: int | None = None
    failed: Failure | None = None
    ranks: tuple[RankCommit, ...] = ()
    lineage: int = 0

    def late_ranks(self, step: int) -> list[int]:
        """Ranks that committed something and not yet ``step``, the latest first."""
        late = [rank for rank in self.ranks if rank.committed_step < step]
        return [rank.global_rank for rank in sorted(late, key=lambda r: r.committed_step)]


class _HeldStep(msgspec.Struct, frozen=True):
    step: int


class HeldSteps(msgspec.Struct, frozen=True, kw_only=True):
    """What the feed's process ``feed_instance`` holds; another one holds nothing of it."""

    feed_instance: str
    steps: list[_HeldStep]
    lineage: int = 0


class _ProblemBody(msgspec.Struct, frozen=True):
    code: str = "unknown"
    detail: str = ""


class FeedClient:
    """Calls of one feed. The client has the deadlines."""

    def __init__(self, http: httpx.AsyncClient, *, url: str, token: str | None) -> None:
        self._http, self._url = http, url
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}

    async def put_step(self, step: int, body: bytes, *, feed_instance: str | None = None) -> None:
        """Hand a step over, with ``feed_instance`` only to that process of the feed.

        Raises FeedBusy, FeedCallFailed (another process answered, too), StepRejected.
        """
        headers = {"content-type": STEP_CONTENT_TYPE}
        if feed_instance is not None:
            headers["sideband-feed-instance"] = feed_instance
        answer = await self._call("PUT", f"/v1/steps/{step}", content=body, headers=headers)
        if answer.is_success:
            return
        problem = _problem(answer)
        if answer.status_code == httpx.codes.PRECONDITION_FAILED:
            raise FeedCallFailed(problem.detail)
        if answer.status_code in LATER_STATUSES:
            raise FeedBusy(problem.detail, retry_after_s=_retry_after_s(answer))
        raise StepRejected(
            step, status=answer.status_code, code=problem.code, detail=problem.detail
        )

    async def acknowledgements(self) -> Acknowledgements:
        """What all ranks have committed. Raises FeedCallFailed."""
        answer = await self._get("/v1/acknowledgements")
        return _decoded(answer, Acknowledgements)

    async def held_steps(self) -> HeldSteps:
        """The steps that the feed holds. Raises FeedCallFailed."""
        return _decoded(await self._get("/v1/steps"), HeldSteps)

    async def go_back(self, line: Line, *, last_step: int) -> None:
        """The trainer went back, the last time as ``line`` ends. Raises FeedCallFailed."""
        *earlier, (lineage, step) = line
        body = msgspec.json.encode(
            {
                "lineage": lineage,
                "step": step,
                "last_step": last_step,
                "earlier": [{"lineage": begun, "step": to} for begun, to in earlier],
            }
        )
        headers = {"content-type": "application/json"}
        answer = await self._call("PUT", "/v1/lineage", content=body, headers=headers)
        if not answer.is_success:
            raise FeedCallFailed(f"lineage: {answer.status_code} {_problem(answer).detail}")

    async def end(self, *, feed_instance: str) -> None:
        """No more steps will come; said to this process of the feed only. Raises FeedCallFailed."""
        headers = {"sideband-feed-instance": feed_instance}
        answer = await self._call("POST", "/v1/end", headers=headers)
        if not answer.is_success:
            raise FeedCallFailed(f"end: {answer.status_code} {_problem(answer).detail}")

    async def reopen(self) -> None:
        """More steps will come after all. Raises FeedCallFailed."""
        answer = await self._call("DELETE", "/v1/end")
        if not answer.is_success:
            raise FeedCallFailed(f"end: {answer.status_code} {_problem(answer).detail}")

    async def _get(self, path: str) -> httpx.Response:
        answer = await self._call("GET", path)
        if not answer.is_success:
            raise FeedCallFailed(f"{path}: {answer.status_code} {_problem(answer).detail}")
        return answer

    async def _call(
        self, method: str, path: str, *, content: bytes = b"", headers: dict[str, str] | None = None
    ) -> httpx.Response:
        try:
            return await self._http.request(
                method, self._url + path, content=content, headers=self._headers | (headers or {})
            )
        except httpx.HTTPError as exc:
            raise FeedCallFailed(f"{method} {path}: {type(exc).__name__} {exc}") from exc


def _decoded(answer: httpx.Response, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except msgspec.MsgspecError as exc:
        raise FeedCallFailed(f"{answer.url.path}: {exc}") from exc


def _problem(answer: httpx.Response) -> _ProblemBody:
    try:
        return msgspec.json.decode(answer.content, type=_ProblemBody)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _ProblemBody(detail=answer.text[:DETAIL_CHARACTERS_MAX])


def _retry_after_s(answer: httpx.Response) -> float:
    value = answer.headers.get("retry-after", "")
    return min(60.0, float(value)) if value.isdigit() else 1.0
