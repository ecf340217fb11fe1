"""structlog for services: events with fields, one JSON object a line, or colours for people."""

import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

import structlog

from services.kit.settings import ServiceSettings

# Method and path of the request that a task works on. One variable: binding it costs nothing.
REQUEST: Final[ContextVar[tuple[str, str] | None]] = ContextVar("request", default=None)
EVENTS_PER_SECOND_MAX: Final = 20  # of one name: a flood of junk must not become one of logs
NAMES_MAX: Final = 1000  # events that are told apart; the code has about a hundred
# Ends of keys whose text is a secret. Numbers pass: tokens are also what models count.
HIDDEN_ENDS: Final = ("authorization", "cookie", "token", "tokens", "password", "secret")


def hide_secrets(
    _logger: object, _name: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Stars instead of any text under a key that names a secret, however deep it lies."""
    return {key: _hidden(key, value) for key, value in event.items()}


def _hidden(key: object, value: Any) -> Any:
    if isinstance(value, dict):
        return {inner: _hidden(inner, found) for inner, found in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hidden(key, found) for found in value]
    is_secret = isinstance(value, (str, bytes)) and str(key).lower().endswith(HIDDEN_ENDS)
    return "***" if is_secret else value


def name_request(
    _logger: object, _name: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """The request's method and path in each of its events."""
    request = REQUEST.get()
    return event if request is None else {"method": request[0], "path": request[1], **event}


class Sampler:
    """Lets ``per_second_max`` events of one name pass in each second, and says what it left out.

    The next event of that name which passes has the number as ``left_out``.
    """

    def __init__(self, *, per_second_max: int, clock_s: Callable[[], float]) -> None:
        self._max, self._clock_s = per_second_max, clock_s
        self._second = 0
        self._seen: dict[str, int] = {}  # in this second
        self._left_out: dict[str, int] = {}

    def __call__(
        self, _logger: object, _name: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """The event, or DropEvent."""
        second = int(self._clock_s())
        if second != self._second:
            self._second, self._seen = second, {}
        name = str(event.get("event"))
        if name not in self._seen and len(self._seen) >= NAMES_MAX:
            raise structlog.DropEvent
        self._seen[name] = seen = self._seen.get(name, 0) + 1
        if seen > self._max:
            if name in self._left_out or len(self._left_out) < NAMES_MAX:
                self._left_out[name] = self._left_out.get(name, 0) + 1
            raise structlog.DropEvent
        left_out = self._left_out.pop(name, 0)
        return {**event, "left_out": left_out} if left_out else event


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
            Sampler(per_second_max=EVENTS_PER_SECOND_MAX, clock_s=time.monotonic),
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
