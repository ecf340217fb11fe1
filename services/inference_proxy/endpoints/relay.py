"""A response whose bytes come from an engine: the engine is cancelled when the client leaves."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import structlog
from fastapi import Response
from starlette.types import Receive, Scope, Send

from services.inference_proxy.sessions import Session
from services.inference_proxy.upstream import UpstreamError
from services.inference_proxy.wanted import Unwanted, while_wanted
from services.kit.server import caller_of

log = structlog.get_logger(__name__)


class RelayResponse(Response):
    """Sends what ``parts`` yields, and always closes it: also before its first byte."""

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        *,
        media_type: str,
        headers: Mapping[str, str],
        deadline_s: float,
        session: Session | None = None,
        status_code: int = 200,
    ) -> None:
        super().__init__(status_code=status_code, headers=dict(headers), media_type=media_type)
        del self.headers["content-length"]
        self._parts, self._deadline_s, self._session = parts, deadline_s, session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the end, the deadline, or the client's leaving."""
        caller = caller_of(scope, receive)
        try:
            async with (
                while_wanted(caller, deadline_s=self._deadline_s, session=self._session),
                aclosing(self._parts) as parts,
            ):
                await anext(parts)  # now closing it closes the engine's connection
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Unwanted as exc:
            log.info("stream_unwanted", why=type(exc).__name__)
        except UpstreamError as exc:
            # Bytes of an answer are out. Ending without the last part makes the server close the
            # connection, so that the client sees an answer cut off and not a whole one.
            log.warning("answer_broken_off", error=str(exc))
