"""Which worker a request belongs to: pure, and the same in every worker.

A session's requests belong to one worker, by a hash of its id. Admin routes belong to the leader,
worker 0: it alone changes what holds for all, and its answers are about all. Anything else is
served where it arrives.
"""

from collections.abc import Mapping
from typing import Final, Literal
from urllib.parse import unquote

import httptools
from starlette.routing import compile_path
from starlette.types import Scope
from xxhash import xxh3_64_intdigest

Place = Literal["here", "session", "named_session", "leader"]

LEADER: Final = 0
# Every route of the application; "named_session" has its session in the path.
PLACES: Final[Mapping[str, Place]] = {
    "/inference/v1/generate": "session",
    "/v1/chat/completions": "session",
    "/v1/completions": "session",
    "/v1/models": "here",
    "/v1/turns/fetch": "here",  # asks the others for what they keep
    "/v1/turns/release": "here",
    "/v1/sessions/{session_id}": "named_session",
    "/v1/sessions": "leader",
    "/v1/engines": "leader",
    "/v1/engines/{name}/eject": "leader",
    "/v1/engines/{name}/return": "leader",
    "/v1/policy-version": "leader",
    "/v1/admin/pause": "leader",
    "/v1/admin/resume": "leader",
    "/v1/admin/drain": "leader",
    "/v1/admin/weights": "leader",
    "/readyz": "leader",
    "/metrics": "leader",
    "/v1/config": "here",
    "/healthz": "here",
    "/version": "here",
    "/openapi.json": "here",
    "/docs": "here",
    "/docs/oauth2-redirect": "here",
    "/redoc": "here",
}
_EXACT: Final = {path: place for path, place in PLACES.items() if "{" not in path}
_PATTERNS: Final = [compile_path(path)[0] for path in PLACES if "{" in path]
_SESSION: Final = b"x-sideband-session"
_SESSION_LINE: Final = b"\r\n" + _SESSION + b":"


def worker_of(session: bytes, workers: int) -> int:
    """The worker of a session; ``workers`` is their number."""
    return xxh3_64_intdigest(session) % workers


def place_of(path: str, session: bytes | None, workers: int) -> int | None:
    """The worker of a request for ``path`` (decoded) of ``session``; None for any."""
    place = _EXACT.get(path)
    if place == "session":
        return None if session is None else worker_of(session, workers)
    if place == "leader":
        return LEADER
    if place is None:
        for pattern in _PATTERNS:
            if found := pattern.match(path):
                named = found.groupdict().get("session_id")
                return LEADER if named is None else worker_of(named.encode(), workers)
    return None


def place_of_head(head: bytes, workers: int) -> int | None:
    """The same for a request of which only the bytes of its head are known.

    A head that this does not understand belongs to any: whoever parses it says what is wrong.
    """
    _, _, rest = head.partition(b" ")
    path = _path_of(rest.lstrip(b" ").partition(b" ")[0]).decode("latin-1")
    if "%" in path:
        path = unquote(path)
    session = None
    at = head.lower().find(_SESSION_LINE)
    if at >= 0:
        start = at + len(_SESSION_LINE)
        stop = head.find(b"\r\n", start)
        session = head[start : stop if stop >= 0 else len(head)].lstrip(b" \t")
    return place_of(path, session, workers)


def _path_of(target: bytes) -> bytes:
    """Of a request's target, which may be a whole URL; none of one that cannot be."""
    if target.startswith(b"/") and b"#" not in target:  # nearly all, in a tenth of the time
        return target.partition(b"?")[0]
    try:
        return httptools.parse_url(target).path or b""
    except httptools.HttpParserInvalidURLError:
        return b""


def place_of_scope(scope: Scope, workers: int) -> int | None:
    """The same for a request that was parsed."""
    session = next((value for name, value in scope["headers"] if name == _SESSION), None)
    return place_of(scope["path"], session, workers)
