"""State as admin routes show it."""

from itertools import islice

from services.inference_proxy.engine import Engine
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.schemas import EngineView, Sessions, SessionView
from services.inference_proxy.sessions import Session, SessionBook


def engine_view(book: EngineBook, engine: Engine) -> EngineView:
    """One engine."""
    return EngineView(
        name=engine.name,
        url=engine.url,
        role=engine.role,
        state=engine.health.state,
        is_serving=book.is_serving(engine),
        why_out=book.why_out(engine),
        policy_version=engine.policy_version,
        in_flight=engine.in_flight,
        requests_total=engine.requests_total,
        failures=engine.health.failures,
        ejections_total=engine.ejections_total,
    )


def engine_views(book: EngineBook) -> list[EngineView]:
    """All, in the order of the settings."""
    return [engine_view(book, engine) for engine in book]


def sessions_view(sessions: SessionBook, *, limit: int) -> Sessions:
    """The most recently used ones, the latest last."""
    count = len(sessions)
    latest = islice(sessions, max(0, count - limit), None)
    return Sessions(sessions=[_session(session) for session in latest], count=count)


def _session(session: Session) -> SessionView:
    return SessionView(
        session_id=session.session_id,
        policy_version=session.policy_version,
        turns_delivered=session.turns_delivered,
        branches=len(session.branches),
        tokens=session.tokens,
        files=len(session.files),
        in_flight=session.in_flight,
    )
