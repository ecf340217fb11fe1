"""Forwarders that do the least of a proxy's work: JSON read, one field injected, JSON read again.

``python -m bench.baseline.forwarders KIND PORT ENGINE_URL``: ``fastapi-httpx`` as services of the
field are written, ``aiohttp`` as bare as Python gets, ``fastapi-empty`` a handler without work.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx
import orjson
import uvicorn
from aiohttp import ClientSession, TCPConnector, web
from fastapi import FastAPI, Request, Response

PATH: Final = "/inference/v1/generate"
PAYLOAD_DIR: Final = "/payloads/v0"
BODY_BYTES_MAX: Final = 64 << 20


def injected(body: bytes) -> bytes:
    """The request with a folder in it."""
    asked: dict[str, Any] = orjson.loads(body)
    params = asked["sampling_params"]
    params["extra_args"] = {**(params.get("extra_args") or {}), "payload_dir": PAYLOAD_DIR}
    return orjson.dumps(asked)


def returned(body: bytes) -> bytes:
    """The answer under the client's id."""
    answer: dict[str, Any] = orjson.loads(body)
    return orjson.dumps({**answer, "request_id": "bench"})


def fastapi_httpx(engine_url: str) -> FastAPI:
    """An endpoint around an httpx client."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=1024, max_keepalive_connections=1024)
        async with httpx.AsyncClient(timeout=60.0, limits=limits, trust_env=False) as client:
            app.state.client = client
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post(PATH)
    async def generate(request: Request) -> Response:
        content = injected(await request.body())
        headers = {"content-type": "application/json"}
        client: httpx.AsyncClient = app.state.client
        answer = await client.post(engine_url + PATH, content=content, headers=headers)
        return Response(returned(answer.content), answer.status_code, media_type="application/json")

    return app


def fastapi_empty(engine_url: str) -> FastAPI:
    """The limit of the framework itself."""
    app = FastAPI()

    @app.post(PATH)
    async def generate(request: Request) -> Response:
        await request.body()
        return Response(b"{}", media_type="application/json")

    return app


def aiohttp_forwarder(engine_url: str) -> web.Application:
    """A handler around an aiohttp session."""
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    key = web.AppKey("session", ClientSession)

    async def session(app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(connector=TCPConnector(limit=0)) as made:
            app[key] = made
            yield

    async def generate(request: web.Request) -> web.Response:
        content = injected(await request.read())
        headers = {"content-type": "application/json"}
        async with app[key].post(engine_url + PATH, data=content, headers=headers) as answer:
            body = returned(await answer.read())
            return web.Response(body=body, status=answer.status, content_type="application/json")

    app.cleanup_ctx.append(session)
    app.router.add_post(PATH, generate)
    return app


def main(kind: str, port: int, engine_url: str) -> None:
    """Serve until killed."""
    if kind == "aiohttp":
        import uvloop  # uvicorn brings its own

        uvloop.install()
        web.run_app(aiohttp_forwarder(engine_url), host="127.0.0.1", port=port, access_log=None)
        return
    app = fastapi_empty(engine_url) if kind == "fastapi-empty" else fastapi_httpx(engine_url)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
