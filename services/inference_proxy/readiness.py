"""Why the proxy cannot serve, in words: for its readiness route."""

from services.inference_proxy.endpoints.parts import Parts
from services.inference_proxy.engine import Role
from services.inference_proxy.engines import EngineBook


def readiness(parts: Parts) -> list[str]:
    """Why requests cannot be served; nothing when they can."""
    if not parts.pusher.settled.is_set():
        return ["the orchestrator has not told the policy version yet"]
    reasons = [_missing(parts.book, role) for role in parts.book.missing_roles()]
    if parts.root.is_set and parts.root.current is None:
        reasons.append(parts.root.problem or "the payload root is not ready")
    if parts.gate.state != "open":
        reasons.append(f"the proxy is {parts.gate.state}")
    return reasons


def _missing(book: EngineBook, role: Role) -> str:
    """That no engine serves, and why those do not that are healthy."""
    alive = [e for e in book if e.role == role and e.health.state == "healthy"]
    said = f" ({'; '.join(f'{e.name}: {book.why_out(e)}' for e in alive)})" if alive else ""
    return f"no {role} engine serves{said}"
