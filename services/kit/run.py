"""Runs a service under uvicorn: logs first, then the application, then a bounded shutdown.

A service that was told to end and did has the exit status 0, whoever told it; uvicorn alone would
die of the signal at last. One that gave up has another status, so that it is started again.
"""

import gc
import os
import signal
import sys
from contextlib import suppress
from typing import Any, Final

import uvicorn

from services.kit import logs
from services.kit.app import ProblemApp
from services.kit.server import CallerProtocol
from services.kit.settings import ServiceSettings

ENDING: Final = (signal.SIGTERM, signal.SIGINT)
CRASHED: Final = 1  # the exit status of a process that gave up


class ToldToEnd(SystemExit):
    """A signal asked the process to end, and nothing is left to do."""


def serve(app: ProblemApp, settings: ServiceSettings) -> None:
    """Serve until SIGTERM or SIGINT; open requests get ``drain_timeout_s`` to end.

    Raises SystemExit when it could not start, or has crashed.
    """
    for number in ENDING:  # while uvicorn runs it has its own; then it raises what came
        signal.signal(number, _end)
    logs.configure(settings)
    # What was imported stays: the collector need not look at it again and again, with all waiting.
    gc.collect()
    gc.freeze()
    app.crash.ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with suppress(ToldToEnd):
        uvicorn.run(app, http=CallerProtocol, **server_options(settings))
    if app.crash.has_happened:
        sys.exit(CRASHED)


def _end(_number: int, _frame: object) -> None:
    raise ToldToEnd(0)


def server_options(settings: ServiceSettings) -> dict[str, Any]:
    """How every service is served, in uvicorn's words."""
    return {
        "host": settings.host,
        "port": settings.port,
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "timeout_graceful_shutdown": max(1, int(settings.drain_timeout_s)),
        "h11_max_incomplete_event_size": 64 << 10,
        "proxy_headers": False,  # nobody asks for the client's address
    }
