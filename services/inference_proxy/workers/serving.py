"""Serves the proxy from one process, or from a parent and its workers."""

import sys
from functools import partial

from prometheus_client import generate_latest

from services.inference_proxy.app import create_app, reasons_not_ready
from services.inference_proxy.config import ProxySettings
from services.inference_proxy.workers.answering import Answering
from services.inference_proxy.workers.calls import Calls
from services.inference_proxy.workers.child import SILENT_S_MAX
from services.inference_proxy.workers.parent import Parent
from services.inference_proxy.workers.state import SharedState
from services.inference_proxy.workers.team import Member
from services.inference_proxy.workers.worker import Seat, WorkerServer
from services.kit import logs
from services.kit.memory import settle
from services.kit.run import CRASHED, serve


def serve_proxy(settings: ProxySettings, *, silent_s_max: float = SILENT_S_MAX) -> None:
    """Until SIGTERM or SIGINT. A worker that hangs for ``silent_s_max`` is replaced."""
    if settings.workers == 1:
        app = create_app(settings)
        settle()
        serve(app, settings)
        return
    logs.configure(settings)
    Parent(
        partial(run_worker, settings),
        host=settings.host,
        port=settings.port,
        workers=settings.workers,
        drain_timeout_s=settings.drain_timeout_s,
        silent_s_max=silent_s_max,
    ).run()


def run_worker(settings: ProxySettings, seat: Seat, state: SharedState | None) -> None:
    """One of several, until it is told to end or its parent has ended."""
    member = Member(index=seat.index, workers=seat.workers, calls=Calls(seat.outboxes), state=state)
    app = create_app(settings, member=member)

    def answering() -> Answering:
        return Answering(
            app.state.parts,
            not_ready=lambda: reasons_not_ready(app),
            scrape=lambda: generate_latest(app.state.registry),
            adopted=state,
        )

    settle()
    server = WorkerServer(app, seat, settings, answering=answering)
    app.crash.ends(server.end)
    server.run(sockets=[seat.listener])
    if app.crash.has_happened:  # the parent starts another in its place
        sys.exit(CRASHED)
