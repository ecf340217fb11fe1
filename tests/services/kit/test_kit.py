"""The HTTP skin that every service wears: one error form, limits, tokens, metrics."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_settings import SettingsConfigDict
from starlette.types import Message, Receive, Scope, Send

from services.kit.app import build_app
from services.kit.middleware import BodyLimit
from services.kit.problems import MEDIA_TYPE
from services.kit.settings import ServiceSettings

TOKEN = "a-token-of-the-tests"


class StubSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="SIDEBAND_STUB_", frozen=True, extra="forbid")


class Item(BaseModel):
    size_bytes: int


def stub_app(settings: StubSettings, reasons: list[str] | None = None) -> FastAPI:
    router = APIRouter()

    @router.post("/v1/items")
    async def take(item: Item) -> Item:
        return item

    @router.get("/v1/crash")
    async def crash() -> None:
        raise RuntimeError("secret detail")

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield

    async def ready() -> list[str]:
        return reasons or []

    return build_app(
        name="stub",
        description="For tests.",
        settings=settings,
        lifespan=lifespan,
        admin_routers=[],
        data_routers=[router],
        ready=ready,
        registry=CollectorRegistry(),
    )


def client(app: FastAPI, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://stub", timeout=5, **options)


def assert_problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status
    assert answer.headers["content-type"] == MEDIA_TYPE
    body: dict[str, Any] = answer.json()
    assert body["code"] == code
    assert body["status"] == status
    return body


async def test_an_invalid_body_names_field_and_rule() -> None:
    async with client(stub_app(StubSettings())) as http:
        body = assert_problem(
            await http.post("/v1/items", json={"size_bytes": "many"}), 422, "invalid_request"
        )
    assert body["faults"][0]["field"] == "body.size_bytes"


async def test_an_unknown_route_and_a_wrong_method_are_problems() -> None:
    async with client(stub_app(StubSettings())) as http:
        assert_problem(await http.get("/nowhere"), 404, "not_found")
        assert_problem(await http.delete("/v1/items"), 405, "method_not_allowed")


async def test_a_bug_is_a_500_that_tells_the_client_nothing() -> None:
    async with client(stub_app(StubSettings())) as http:
        body = assert_problem(await http.get("/v1/crash"), 500, "internal_error")
    assert "secret" not in str(body)


async def test_a_body_over_the_limit_is_refused_declared_or_not() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 100

    async with client(stub_app(StubSettings(body_bytes_max=1024))) as http:
        declared = await http.post("/v1/items", content=b" " * 2000)
        streamed = await http.post("/v1/items", content=chunks())
        fits = await http.post("/v1/items", json={"size_bytes": 1})
    assert_problem(declared, 413, "body_too_large")
    assert_problem(streamed, 413, "body_too_large")
    assert fits.status_code == 200


@pytest.mark.parametrize("path", ["/steers", "/large"])
@pytest.mark.parametrize(("declared", "parts_read"), [(None, 11), (10**9, 0)])
async def test_a_body_over_the_limit_is_read_no_further(
    declared: int | None, parts_read: int, path: str
) -> None:
    """It has no end: whoever reads on never answers, and holds more and more."""
    parts, said = 0, []

    async def receive() -> Message:
        nonlocal parts
        parts += 1
        assert parts <= parts_read, "it is read on"
        return {"type": "http.request", "body": b" " * 100, "more_body": True}

    async def send(message: Message) -> None:
        said.append(message)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass

    framing = (b"transfer-encoding", b"chunked")
    if declared is not None:
        framing = (b"content-length", str(declared).encode())
    scope = {"type": "http", "method": "POST", "path": path, "headers": [framing]}
    limit = BodyLimit(app, body_bytes_max=1024, large_routes=[("POST", "/large")])
    await limit(scope, receive, send)
    assert said[0]["status"] == 413
    assert parts == parts_read


async def test_a_body_that_is_not_utf8_is_named() -> None:
    async with client(stub_app(StubSettings())) as http:
        headers = {"content-type": "application/json"}
        answer = await http.post(
            "/v1/items", content=b'{"size_bytes": "\xca\xa8\x80"}', headers=headers
        )
    body = assert_problem(answer, 422, "invalid_request")
    assert body["faults"] == [{"field": "body", "rule": "must be JSON in UTF-8", "value": None}]


async def test_tokens_guard_the_data_and_not_the_health() -> None:
    settings = StubSettings(admin_tokens=(SecretStr(TOKEN), SecretStr("another-token-of-tests")))
    async with client(stub_app(settings)) as http:
        assert_problem(await http.get("/v1/config"), 401, "unauthorized")
        wrong = {"authorization": "Bearer wrong"}
        assert_problem(await http.get("/v1/config", headers=wrong), 401, "unauthorized")
        right = await http.get("/v1/config", headers={"authorization": f"Bearer {TOKEN}"})
        health = await http.get("/healthz")
    assert TOKEN not in right.text
    assert right.status_code == health.status_code == 200


async def test_readiness_names_its_reasons() -> None:
    async with client(stub_app(StubSettings(), reasons=["no engine serves"])) as http:
        body = assert_problem(await http.get("/readyz"), 503, "not_ready")
    assert body["reasons"] == ["no engine serves"]


async def test_metrics_are_labelled_by_route_template() -> None:
    async with client(stub_app(StubSettings())) as http:
        await http.post("/v1/items", json={"size_bytes": 1})
        await http.get("/v1/some-client-chosen-path")
        text = (await http.get("/metrics")).text
    assert 'route="/v1/items",status="200"' in text
    assert "some-client-chosen-path" not in text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "engine-7.example"])
def test_listening_beyond_loopback_needs_a_token(host: str) -> None:
    with pytest.raises(ValidationError, match="admin_tokens is empty"):
        StubSettings(host=host)
    assert StubSettings(host=host, admin_tokens=(SecretStr(TOKEN),)).port == 8000


def test_a_short_token_and_an_unknown_variable_fail_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValidationError, match="under 16 characters"):
        StubSettings(admin_tokens=(SecretStr("short"),))
    monkeypatch.setenv("SIDEBAND_STUB_PROT", "1")
    with pytest.raises(ValidationError, match="SIDEBAND_STUB_PROT"):
        StubSettings()
