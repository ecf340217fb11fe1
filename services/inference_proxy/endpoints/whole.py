"""Whole answers, in one part or in several: none is joined to be sent."""

from collections.abc import Mapping

from fastapi import Response
from starlette.types import Receive, Scope, Send

from services.inference_proxy.long_json import Parts, size_of
from services.inference_proxy.planning import Plan
from services.kit.server import START, protocol_of, send_whole


class PartsResponse(Response):
    """A body of known size, sent part by part."""

    def __init__(
        self, parts: Parts, *, media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self.parts = parts
        super().__init__(
            headers={**(headers or {}), "content-length": str(size_of(parts))},
            media_type=media_type,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; a client that is slow is waited for between two parts."""
        await send({"type": START, "status": self.status_code, "headers": self.raw_headers})
        await send_parts(send, self.parts)


class WholeAnswer(Response):
    """A JSON answer whose headers are known."""

    def __init__(self, parts: Parts, plan: Plan) -> None:
        self.status_code, self.parts, self.background = 200, parts, None
        self.raw_headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % size_of(parts)),
        ]
        if plan.is_train:
            self.raw_headers.append((b"x-sideband-policy-version", b"%d" % plan.policy_version))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, at once where it is in one part and the server can."""
        message = {"type": START, "status": 200, "headers": self.raw_headers}
        if len(self.parts) > 1:
            await send(message)
            await send_parts(send, self.parts)
            return
        message["body"] = self.parts[0]
        if protocol_of(scope) is None:
            await send_whole(send, message)
        else:
            await send(message)


async def send_parts(send: Send, parts: Parts) -> None:
    """A body in ASGI's messages."""
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
