"""What crosses the proxy and what never does: headers, credentials, hosts."""

import logging
from pathlib import Path
from typing import Any

import pytest
import structlog
from pydantic import SecretStr, ValidationError
from starlette.responses import Response, StreamingResponse

from services.inference_proxy.config import EngineSettings, ProxySettings
from services.inference_proxy.headers import to_client, to_engine
from tests.services.inference_proxy.harness import GENERATE, TRAIN, request_body, running
from tests.services.inference_proxy.stub import StubEngine

CLIENT_TOKEN = "token-of-the-client-0123456789"
ENGINE_TOKEN = "token-of-the-engine-0123456789"


async def test_credentials_ids_and_hop_by_hop_headers_end_at_the_proxy() -> None:
    engine = StubEngine()
    sent = {
        **TRAIN,
        "authorization": f"Bearer {CLIENT_TOKEN}",
        "cookie": "session=1",
        "x-request-id": "mine",
        "x-forwarded-host": "evil.example",
        "connection": "close, x-correlation-id",
        "te": "trailers",
        "proxy-authorization": "Basic x",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-correlation-id": "dropped: named by Connection",
    }
    settings: dict[str, Any] = {
        "admin_tokens": (SecretStr(CLIENT_TOKEN),),
        "engine_token": SecretStr(ENGINE_TOKEN),
    }
    async with running({"e0": engine}, **settings) as proxy:
        answer = await proxy.http.post(GENERATE, json=request_body([1, 2]), headers=sent)
        assert answer.status_code == 200
        seen = engine.headers[0]
        assert seen["authorization"] == f"Bearer {ENGINE_TOKEN}"
        assert seen["traceparent"] == sent["traceparent"]
        assert not {"cookie", "x-request-id", "x-forwarded-host", "te"} & seen.keys()
        assert not {"proxy-authorization", "x-correlation-id"} & seen.keys()


# RFC 9110 (7.6.1) and RFC 9112, and what older peers send.
HOP_BY_HOP = {
    "Connection": "X-Named",
    "Keep-Alive": "timeout=99",
    "Proxy-Authenticate": "Basic",
    "Proxy-Authorization": "Basic x",
    "Proxy-Connection": "keep-alive",
    "TE": "trailers",
    "Trailer": "X-Later",
    "Transfer-Encoding": "gzip, chunked",
    "Upgrade": "h2c",
}


@pytest.mark.parametrize("name", HOP_BY_HOP)
def test_no_hop_by_hop_header_goes_on_in_either_direction(name: str) -> None:
    given = [(name, HOP_BY_HOP[name]), (name.upper(), "again"), ("X-Kept", "1")]
    assert to_client(given) == {"x-kept": "1"}
    assert to_engine(given, token=None) == {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, request_body([1, 2])),
        (GENERATE, {**request_body([1, 2]), "stream": True}),
        ("/v1/chat/completions", {"messages": [], "stream": True}),
        ("/v1/chat/completions", {"messages": []}),
    ],
)
async def test_an_engines_own_headers_and_no_hop_by_hop_ones_reach_the_client(
    path: str, body: dict[str, Any]
) -> None:
    def answer(asked: dict[str, Any]) -> Response:
        if "token_ids" not in asked:
            found = engine.openai(asked)
        elif asked.get("stream"):
            events = engine.events(engine.generate(asked))
            found = StreamingResponse(events, media_type="text/event-stream")
        else:
            found = engine.json(engine.generate(asked))
        found.raw_headers += [(name.encode(), value.encode()) for name, value in said.items()]
        return found

    said = {"keep-alive": "timeout=99", "upgrade": "h2c", "proxy-authenticate": "Basic"}
    said |= {"connection": "x-named", "x-named": "1", "set-cookie": "a=b", "x-engine": "e"}
    engine = StubEngine()
    engine.script.append(answer)
    async with running({"e0": engine}, has_sockets=True) as proxy:
        found = await proxy.http.post(path, json=body)
    assert found.status_code == 200
    passes = path != GENERATE or "stream" in body  # else the answer is the proxy's own
    assert ("x-engine" in found.headers) is passes
    dropped = {"keep-alive", "upgrade", "proxy-authenticate", "x-named", "set-cookie"}
    assert not dropped & found.headers.keys()


async def test_without_a_token_every_route_but_health_is_closed() -> None:
    settings: dict[str, Any] = {"admin_tokens": (SecretStr(CLIENT_TOKEN),)}
    async with running({"e0": StubEngine()}, **settings) as proxy:
        for method, path in (("POST", GENERATE), ("GET", "/v1/models"), ("GET", "/v1/sessions")):
            answer = await proxy.http.request(method, path, json={})
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
        assert (await proxy.http.get("/readyz")).status_code == 200


async def test_tokens_never_reach_a_log_nor_the_config_route(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    engine = StubEngine()
    engine.script.append(lambda _: StubEngine.json({"error": "no"}, 401))
    settings: dict[str, Any] = {
        "admin_tokens": (SecretStr(CLIENT_TOKEN),),
        "engine_token": SecretStr(ENGINE_TOKEN),
        "orchestrator_token": SecretStr(ENGINE_TOKEN),
    }
    with caplog.at_level(logging.DEBUG), structlog.testing.capture_logs() as logs:
        async with running({"e0": engine}, **settings) as proxy:
            bearer = {"authorization": f"Bearer {CLIENT_TOKEN}"}
            await proxy.http.post(GENERATE, json=request_body([1]), headers={**TRAIN, **bearer})
            wrong = {"authorization": "Bearer wrong-token-0123456789"}
            await proxy.http.post(GENERATE, json=request_body([1]), headers={**TRAIN, **wrong})
            config = (await proxy.http.get("/v1/config", headers=bearer)).text
    captured = capfd.readouterr()
    said = f"{logs}{caplog.text}{captured.out}{captured.err}{config}"
    assert logs
    for token in (CLIENT_TOKEN, ENGINE_TOKEN, "wrong-token-0123456789"):
        assert token not in said


async def test_a_redirect_of_an_engine_is_not_followed() -> None:
    engine = StubEngine()
    moved = StubEngine.json({}, 307)
    moved.headers["location"] = "http://evil.example/inference/v1/generate"
    engine.script.append(lambda _: moved)
    async with running({"e0": engine}, attempts_max=1) as proxy:
        answer = await proxy.generate(request_body([1]))
        assert (answer.status_code, answer.json()["code"]) == (502, "upstream_failed")


async def test_a_clients_id_cannot_name_a_host() -> None:
    """Some transfer connectors read peer addresses out of the request id."""
    engine = StubEngine()
    async with running({"e0": engine}) as proxy:
        body = {**request_body([1]), "request_id": "___decode_addr_10.0.0.1:9___x"}
        answer = await proxy.generate(body)
        assert answer.json()["request_id"] == body["request_id"]
        assert "_addr_" not in engine.requests[0]["request_id"]


async def test_a_root_that_appears_later_is_waited_for(tmp_path: Path) -> None:
    from sideband.payload.root import PayloadRoot
    from tests.services.inference_proxy.harness import RUN, until

    root = tmp_path / "later"
    engine = StubEngine()
    async with running({"e0": engine}, payload_root_later=root) as proxy:
        early = await proxy.generate(request_body([1, 2]))
        assert (early.status_code, early.json()["code"]) == (503, "payload_root_not_ready")
        reasons = (await proxy.http.get("/readyz")).json()["reasons"]
        assert len(reasons) == 1
        assert str(root) in reasons[0]
        PayloadRoot.create(root, RUN, fresh=True)
        engine.root = root
        await until(lambda: proxy.parts.root.current is not None)
        assert (await proxy.generate(request_body([1, 2]))).status_code == 200


async def test_a_root_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    root = tmp_path / "root"
    async with running({"e0": StubEngine()}, root=root, run_id="run-2") as proxy:
        answer = await proxy.generate(request_body([1]))
        assert answer.json()["code"] == "payload_root_not_ready"
        assert "run-1" in answer.json()["detail"]


def test_connection_names_further_hop_by_hop_headers() -> None:
    assert to_client([("Connection", "X-Secret"), ("X-Secret", "1"), ("X-Kept", "2")]) == {
        "x-kept": "2"
    }
    assert to_engine([("Accept", "a/b"), ("Host", "evil")], token=None) == {
        "accept": "a/b",
        "content-type": "application/json",
    }


def engines(*roles: str) -> list[dict[str, str]]:
    return [
        {"name": f"e{i}", "url": "http://127.0.0.1:1", "role": role} for i, role in enumerate(roles)
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engines": engines("prefill")}, "one of each"),
        ({"engines": engines("colocated", "decode")}, "do not mix"),
        ({"engines": engines("colocated") * 2}, "comes twice"),
        ({"payload_root": "relative"}, "absolute"),
        ({"orchestrator_url": "ftp://x"}, "http or https"),
        ({"orchestrator_url": "http://user:pw@x"}, "credentials"),
        ({"attempts_max": 0}, "greater than or equal"),
        ({"unknown": 1}, "not permitted"),
    ],
)
def test_wrong_settings_fail_at_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ProxySettings(**settings)


@pytest.mark.parametrize(
    "change", [{"name": "a/b"}, {"url": "127.0.0.1:80"}, {"role": "both"}, {"payload_mount": "x"}]
)
def test_wrong_engines_fail_at_start(change: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        EngineSettings.model_validate({**engines("colocated")[0], **change})


def test_engines_come_from_one_variable_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "SIDEBAND_PROXY_ENGINES",
        '[{"name": "p", "url": "http://p:1/", "role": "prefill", "payload_mount": "/mnt/a"},'
        ' {"name": "d", "url": "http://d:1", "role": "decode"}]',
    )
    monkeypatch.setenv("SIDEBAND_PROXY_PAYLOAD_ROOT", "/run/payloads")
    settings = ProxySettings()
    assert [engine.url for engine in settings.engines] == ["http://p:1", "http://d:1"]
    assert [settings.mount_of(e) for e in settings.engines] == ["/mnt/a", "/run/payloads"]
