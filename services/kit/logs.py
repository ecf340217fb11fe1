"""structlog for services: events with fields, one JSON object a line, or colours for people."""

import logging
import sys
from contextvars import ContextVar
from typing import Final

import structlog

from services.kit.settings import ServiceSettings

# Method and path of the request that a task works on. One variable: binding it costs nothing.
REQUEST: Final[ContextVar[tuple[str, str] | None]] = ContextVar("request", default=None)
HIDDEN_KEYS: Final = frozenset({"authorization", "token", "admin_tokens", "password", "secret"})


def hide_secrets(
    _logger: object, _name: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Stars instead of the value of any key that names a secret."""
    return {key: "***" if key.lower() in HIDDEN_KEYS else value for key, value in event.items()}


def name_request(
    _logger: object, _name: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """The request's method and path in each of its events."""
    request = REQUEST.get()
    return event if request is None else {"method": request[0], "path": request[1], **event}


def configure(settings: ServiceSettings) -> None:
    """Set up structlog and the standard library's logging, once per process."""
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer()
    )
    structlog.configure(
        processors=[
            name_request,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            hide_secrets,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.basicConfig(level=max(level, logging.WARNING), stream=sys.stderr)
