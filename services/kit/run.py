"""Runs a service under uvicorn: logs first, then the application, then a bounded shutdown."""

import gc
from typing import Any

import uvicorn
from fastapi import FastAPI

from services.kit import logs
from services.kit.server import CallerProtocol
from services.kit.settings import ServiceSettings


def serve(app: FastAPI, settings: ServiceSettings) -> None:
    """Serve until SIGTERM or SIGINT; open requests get ``drain_timeout_s`` to end."""
    logs.configure(settings)
    # What was imported stays: the collector need not look at it again and again, with all waiting.
    gc.collect()
    gc.freeze()
    uvicorn.run(app, http=CallerProtocol, **server_options(settings))


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
