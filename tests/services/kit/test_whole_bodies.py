"""Nothing is done for a request whose body is broken, cut, late or too large."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.inference_proxy.app import describe as describe_proxy
from services.kit import middleware
from services.kit.app import build_app
from services.kit.bodies import CONTROL_BYTES_MAX
from services.orchestrator.app import describe as describe_orchestrator
from services.trainer_feed.app import describe as describe_feed
from tests.services.kit.test_heads import cut, fed, statuses
from tests.services.kit.test_kit import StubSettings
from tests.services.kit.test_server import connected

HEAD = b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
LARGE_ROUTES = {
    ("POST", "/inference/v1/generate"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/rollouts"),
    ("PUT", "/v1/steps/7"),
}


@asynccontextmanager
async def nothing_runs(_app: FastAPI) -> AsyncIterator[None]:
    yield


class Acting:
    """A service with routes that need no body, and one whose large body the route reads."""

    def __init__(self) -> None:
        self.done: list[str] = []
        router = APIRouter()

        @router.api_route("/v1/act", methods=["POST", "DELETE"])
        async def act() -> str:
            self.done.append("act")
            return "done"

        @router.post("/v1/large")
        async def large(request: Request) -> str:
            size_bytes = len(await request.body())
            self.done.append(f"large {size_bytes}")
            return "done"

        async def ready() -> list[str]:
            return []

        self.app = build_app(
            name="stub",
            description="For tests.",
            settings=StubSettings(),
            lifespan=nothing_runs,
            admin_routers=[router],
            ready=ready,
            registry=CollectorRegistry(),
            large_routes=[("POST", "/v1/large")],
        )


@pytest.mark.parametrize("path", [b"/v1/act", b"/v1/large"])
@pytest.mark.parametrize("part_bytes", [7, 1 << 20])
async def test_a_body_with_a_broken_frame_does_nothing(path: bytes, part_bytes: int) -> None:
    stub = Acting()
    protocol, transport = connected(stub.app)
    request = HEAD % path + b"3\r\nabc\r\nno size\r\n"
    await fed(protocol, *cut(request, part_bytes))
    assert statuses(transport) == [400]
    assert stub.done == []


@pytest.mark.parametrize("path", [b"/v1/act", b"/v1/large"])
async def test_a_body_that_is_cut_does_nothing(path: bytes) -> None:
    stub = Acting()
    protocol, transport = connected(stub.app)
    await fed(protocol, HEAD % path + b"3\r\nabc\r\n")
    assert stub.done == []
    protocol.connection_lost(None)
    await fed(protocol)
    assert (stub.done, statuses(transport)) == ([], [])


async def test_a_body_that_is_too_large_does_nothing_where_none_is_read() -> None:
    stub = Acting()
    protocol, transport = connected(stub.app)
    part = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    await fed(protocol, HEAD % b"/v1/act", part, part, part)
    assert statuses(transport) == [413]
    assert stub.done == []


async def test_a_body_that_does_not_come_is_refused_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(middleware, "CONTROL_S_MAX", 0.0)
    stub = Acting()
    protocol, transport = connected(stub.app)
    async with asyncio.timeout(10):
        while not transport.parts:
            await fed(protocol, *([] if protocol.cycle else [HEAD % b"/v1/act" + b"3\r\nabc\r\n"]))
    assert (statuses(transport), stub.done) == ([408], [])
    await fed(protocol)
    assert transport.is_closed  # whoever is that slow has had its time


async def test_whole_bodies_and_none_are_answered() -> None:
    stub = Acting()
    protocol, transport = connected(stub.app)
    whole = b"3\r\nabc\r\n0\r\n\r\n"
    for request in (
        HEAD % b"/v1/act" + whole,
        b"POST /v1/act HTTP/1.1\r\nhost: x\r\n\r\n",
        b"DELETE /v1/act HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc",
        b"POST /v1/act HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
    ):
        await fed(protocol, request, *[b""] * 4)
    assert (statuses(transport), stub.done) == ([200] * 4, ["act"] * 4)


def test_a_large_route_reads_what_others_may_not_have() -> None:
    stub, content = Acting(), b" " * (CONTROL_BYTES_MAX + 1)
    with TestClient(stub.app) as http:
        assert http.post("/v1/large", content=content).status_code == 200
        assert http.put("/v1/large", content=content).status_code == 413
        assert http.post("/v1/large/more", content=content).status_code == 413
    assert stub.done == [f"large {len(content)}"]


class Reached:
    """Notes which requests come as far as the routes of a service."""

    def __init__(self, app: ASGIApp, *, found: set[tuple[str, str]]) -> None:
        self._found = found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._found.add((scope["method"], scope["path"]))


def routes_of(app: FastAPI) -> Iterator[tuple[str, str]]:
    for path, operations in app.openapi()["paths"].items():
        for method in operations:
            yield method.upper(), path.replace("{step}", "7")


async def test_only_routes_that_read_a_large_body_see_a_request_before_its_body_is_whole() -> None:
    reached: set[tuple[str, str]] = set()
    asked = 0
    for describe in (describe_proxy, describe_orchestrator, describe_feed):
        app = describe()
        every = list(routes_of(app))
        app.user_middleware.append(Middleware(Reached, found=reached))
        for method, path in every:
            asked += 1
            due = iter([{"type": "http.request", "body": b"{", "more_body": True}])

            async def receive(due: Iterator[Message] = due) -> Message:
                return next(due, {"type": "http.disconnect"})

            async def send(message: Message) -> None:
                raise AssertionError(f"nobody is left to hear {message}")

            scope = {
                "type": "http",
                "method": method,
                "path": path,
                "headers": [(b"transfer-encoding", b"chunked")],
                "query_string": b"",
            }
            await app(scope, receive, send)
    assert reached == LARGE_ROUTES
    assert asked > 50
