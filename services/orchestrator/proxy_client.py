"""The orchestrator's view of the inference proxy: its policy version, sessions to discard."""

import httpx
import msgspec

from sideband.ids import SessionId


class ProxyCallFailed(Exception):
    """No usable answer. Repeating is safe."""


class _Applied(msgspec.Struct, frozen=True):
    applied: int


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

    async def _call(self, method: str, path: str, *, gone_is_fine: bool = False) -> httpx.Response:
        try:
            answer = await self._http.request(method, self._url + path, headers=self._headers)
        except httpx.HTTPError as exc:
            raise ProxyCallFailed(f"{method} {path}: {type(exc).__name__} {exc}") from exc
        if not answer.is_success and not (gone_is_fine and answer.status_code == 404):
            raise ProxyCallFailed(f"{method} {path}: {answer.status_code}")
        return answer
