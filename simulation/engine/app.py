"""The simulated engine's HTTP face: the routes of vLLM that the proxy uses, and its counters."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from sideband.errors import SidebandError
from simulation.engine.answers import stream_bodies
from simulation.engine.service import Engine, EngineDead, MaskRefused, Run
from simulation.engine.settings import EngineSettings
from simulation.engine.wire import BadRequest, GenerateRequest, error_body, parse

CLIENT_LEFT: Final = 499


def build_app(settings: EngineSettings) -> FastAPI:
    """One engine. Its state is ``app.state.engine``."""
    engine = Engine(settings)
    app = FastAPI(title="Simulated engine", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.engine = engine

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        return await _generate(engine, request)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=503 if engine.is_dead else 200)

    @app.get("/v1/models")
    async def models() -> Response:
        entry = {"id": settings.model, "object": "model", "owned_by": "sideband"}
        return _json({"object": "list", "data": [entry]})

    @app.get("/weight_version")
    async def read_version() -> Response:
        return _json({"weight_version": engine.weight_version})

    @app.post("/update_weight_version")
    async def update_version(request: Request) -> Response:
        body = orjson.loads(await request.body())
        engine.weight_version = str(body["weight_version"])
        return _json({"weight_version": engine.weight_version})

    @app.get("/simulation/counters")
    async def counters() -> Response:
        return _json({"name": settings.name, "role": settings.role, **engine.counters})

    return app


async def _generate(engine: Engine, http: Request) -> Response:
    body = await http.body()
    try:
        request = await asyncio.to_thread(parse, body, vocab_size=engine.truth.model.vocab_size)
        run = await _until_disconnect(engine, request, http)
    except BadRequest as exc:
        return _json(error_body(400, exc.message, "BadRequestError"), 400)
    except SidebandError as exc:  # a payload that could not be written
        return _json(error_body(500, str(exc), "InternalServerError"), 500)
    except (EngineDead, MaskRefused) as exc:
        return _json(error_body(500, str(exc), "InternalServerError"), 500)
    if run is None:
        return Response(status_code=CLIENT_LEFT)
    if request.stream:
        return StreamingResponse(_events(engine, request, run), media_type="text/event-stream")
    answer = await asyncio.to_thread(orjson.dumps, run.body)
    engine.counters["answer_bytes"] += len(answer)
    return Response(answer, media_type="application/json")


async def _until_disconnect(engine: Engine, request: GenerateRequest, http: Request) -> Run | None:
    """The finished run, or None when the client went away first: then it is cancelled."""
    work = asyncio.create_task(engine.run(request))
    gone = asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        return None
    finally:
        for task in (work, gone):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, BadRequest, EngineDead, MaskRefused):
                await task


async def _disconnected(http: Request) -> None:
    """Returns when the client has left. The body is read already, so nothing else can come."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _events(engine: Engine, request: GenerateRequest, run: Run) -> AsyncIterator[bytes]:
    bodies = stream_bodies(run.request_id, request, run.outcomes, run.choices, run.handle)
    for body in bodies:
        event = b"data: " + orjson.dumps(body) + b"\n\n"
        engine.counters["answer_bytes"] += len(event)
        yield event
    yield b"data: [DONE]\n\n"


def _json(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")
