"""Which HTTP headers cross the proxy: pure.

Towards an engine only what is listed goes: a client's credentials, its cookies, its idea of hosts
and its ``X-Request-Id`` (vLLM would take it over the body's) end here. Towards the client goes
everything but hop-by-hop headers and what the proxy's own server sets.
"""

from collections.abc import Iterable, Mapping
from typing import Final

TO_ENGINE: Final = frozenset({"accept", "traceparent", "tracestate", "x-correlation-id"})
HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Set by our own server, or untrue once the body was decoded.
_OURS: Final = frozenset(
    {"content-length", "content-encoding", "date", "server", "set-cookie", "content-type"}
)


def to_engine(headers: Iterable[tuple[str, str]], *, token: str | None) -> dict[str, str]:
    """Headers of an upstream request; ``token`` is the engine's own credential."""
    named = {name.lower(): value for name, value in headers}
    dropped = _named_by_connection(named)
    kept = {
        name: named[name]
        for name in TO_ENGINE & named.keys()
        if name not in dropped and is_sendable(named[name])
    }
    kept["content-type"] = "application/json"
    if token is not None:
        kept["authorization"] = f"Bearer {token}"
    return kept


def to_client(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Headers of an answer; its content type is the caller's to set."""
    named = {name.lower(): value for name, value in headers}
    dropped = HOP_BY_HOP | _OURS | _named_by_connection(named)
    return {
        name: value for name, value in named.items() if name not in dropped and is_sendable(value)
    }


def is_sendable(value: str) -> bool:
    """Whether a header of an engine can be sent on: HTTP has Latin-1 and no control characters."""
    try:
        value.encode("latin-1")
    except UnicodeEncodeError:
        return False
    return value.isprintable()


def _named_by_connection(headers: Mapping[str, str]) -> frozenset[str]:
    """Further hop-by-hop headers: those that ``Connection`` names."""
    listed = headers.get("connection", "").split(",")
    return frozenset(name.strip().lower() for name in listed)
