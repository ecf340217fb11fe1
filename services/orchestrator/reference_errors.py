"""What a rollout by reference meets; a part of the tree in ``errors``.

Problem
├── TurnsMissing (404, 409)  the proxy cannot give a turn; ``code`` is the proxy's own
│   └── TurnGone (410)
├── NoProxy (409)
└── ProxyUnavailable (503, with Retry-After)
"""

from services.kit.problems import Problem
from services.orchestrator.errors import RETRY_SOON


class TurnsMissing(Problem):
    """The proxy cannot give a turn that a rollout refers to; ``code`` is the proxy's."""

    status, code, title = 409, "turn_running", "Turn cannot be fetched"


class TurnGone(TurnsMissing):
    """It was kept and is no more: deliver the turns themselves, or give the rollout up."""

    status, code, title = 410, "turn_expired", "Turn gone"


class NoProxy(Problem):
    """A rollout by reference in a run without a proxy."""

    status, code, title = 409, "no_proxy", "No proxy"


class ProxyUnavailable(Problem):
    """The proxy did not answer."""

    status, code, title = 503, "proxy_unavailable", "Proxy unavailable"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, headers=RETRY_SOON)
