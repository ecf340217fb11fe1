"""The orchestrator's view of the inference proxy: its policy version, sessions to discard."""

from typing import Final

import httpx
import msgspec

from services.kit.readers.held import HeldBody
from services.kit.turns import TURNS_CONTENT_TYPE
from services.orchestrator.errors import RETRY_SOON
from services.orchestrator.limits import DETAIL_CHARACTERS_MAX
from services.orchestrator.reference_errors import TurnGone, TurnsMissing
from services.orchestrator.wire import TurnRefWire
from sideband.ids import SessionId

PROBLEM_BYTES_MAX: Final = 64 << 10  # of what is not the turns


class ProxyCallFailed(Exception):
    """No usable answer. Repeating is safe."""


class _Applied(msgspec.Struct, frozen=True):
    applied: int


class TurnsAsked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Kept turns: by request id, or all of a session."""

    run_id: str
    turns: list[TurnRefWire] | None = None
    session_id: str | None = None
    choice: int = 0


class _Problem(msgspec.Struct, frozen=True):
    code: str
    detail: str
    request_id: str | None = None
    session_id: str | None = None


class ProxyClient:
    """Calls of one proxy. The client has the deadlines."""

    def __init__(self, http: httpx.AsyncClient, *, url: str, token: str | None) -> None:
        self._http, self._url = http, url
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}

    async def applied_version(self) -> int:
        """The least policy version over the serving engines. Raises ProxyCallFailed."""
        answer = await self._call("GET", "/v1/policy-version")
        try:
            return msgspec.json.decode(answer.content, type=_Applied).applied
        except msgspec.MsgspecError as exc:
            raise ProxyCallFailed(f"policy version: {exc}") from exc

    async def discard_session(self, session_id: SessionId) -> None:
        """Forget a session and delete the files that it wrote. Raises ProxyCallFailed."""
        await self._call(
            "DELETE", f"/v1/sessions/{session_id}?delete_files=true", gone_is_fine=True
        )

    async def fetch_turns(self, asked: TurnsAsked, turns: HeldBody, *, bytes_max: int) -> None:
        """Put kept turns, encoded, into ``turns``.

        Raises TurnsMissing for one that is not given, ProxyCallFailed, ReadersBusy.
        """
        path, told = "/v1/turns/fetch", b""
        headers = {
            **self._headers,
            "accept": TURNS_CONTENT_TYPE,
            "content-type": "application/json",
        }
        request = msgspec.json.encode(asked)
        try:
            async with self._http.stream(
                "POST", self._url + path, content=request, headers=headers
            ) as answer:
                async for chunk in answer.aiter_bytes():
                    if not answer.is_success:
                        told = (told + chunk)[:PROBLEM_BYTES_MAX]
                        continue
                    turns.add(chunk)
                    if turns.size_bytes > bytes_max:
                        raise ProxyCallFailed(f"POST {path}: more than {bytes_max} bytes")
        except httpx.HTTPError as exc:
            raise ProxyCallFailed(f"POST {path}: {type(exc).__name__} {exc}") from exc
        if answer.status_code in {404, 409, 410}:
            raise _missing(answer.status_code, told)
        if not answer.is_success:
            raise ProxyCallFailed(f"POST {path}: {answer.status_code}")

    async def release_turns(self, asked: TurnsAsked) -> None:
        """Say that turns were handed in durably. Raises ProxyCallFailed."""
        await self._call("POST", "/v1/turns/release", content=msgspec.json.encode(asked))

    async def _call(
        self, method: str, path: str, *, gone_is_fine: bool = False, content: bytes | None = None
    ) -> httpx.Response:
        headers = self._headers
        if content is not None:
            headers = {**headers, "content-type": "application/json"}
        try:
            answer = await self._http.request(
                method, self._url + path, headers=headers, content=content
            )
        except httpx.HTTPError as exc:
            raise ProxyCallFailed(f"{method} {path}: {type(exc).__name__} {exc}") from exc
        if not answer.is_success and not (gone_is_fine and answer.status_code == 404):
            raise ProxyCallFailed(f"{method} {path}: {answer.status_code}")
        return answer


def _missing(status: int, content: bytes) -> TurnsMissing:
    """The proxy's own reason, its code and facts kept. Raises ProxyCallFailed for any other 4xx."""
    try:
        problem = msgspec.json.decode(content, type=_Problem)
    except msgspec.MsgspecError as exc:
        raise ProxyCallFailed(f"turns: status {status} without a problem") from exc
    if not problem.code.startswith("turn_"):  # an older proxy has no such route
        raise ProxyCallFailed(f"turns: {problem.detail[:DETAIL_CHARACTERS_MAX]}")
    kind = TurnGone if status == 410 else TurnsMissing
    headers = RETRY_SOON if problem.code == "turn_running" else None
    missing = kind(
        problem.detail[:DETAIL_CHARACTERS_MAX], status=status, code=problem.code, headers=headers
    )
    named = {"request_id": problem.request_id, "session_id": problem.session_id}
    missing.facts = {name: value for name, value in named.items() if value is not None}
    return missing
