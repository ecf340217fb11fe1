"""A dialect that the proxy does not know, in one file: its engine has forms of its own."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response

from services.inference_proxy.dialects.base import Ask, Body, UnreadableAnswer
from services.inference_proxy.dialects.vllm import VllmEvents
from sideband.model import ModelShape
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import (
    MODEL,
    all_layers,
    kept_ids,
    sampled,
    true_rows,
)


class PlainDialect:
    """Rows as nested lists, kept sets by position."""

    name = "plain"
    generate_path = "/continue"
    health_path = "/alive"
    identity_path: str | None = None
    decode_continues_prefill = True

    def __init__(self, model: ModelShape | None) -> None:
        self._model = model

    def whole(self, body: Body, ask: Ask) -> Body:
        limit = body["sampling_params"]["max_tokens"]
        return {"after": body["token_ids"], "count": limit, "first_row": ask.prompt_start}

    def prefill(self, body: Body, ask: Ask) -> Body:
        raise AssertionError("never in a pair")

    def decode(self, body: Body, ask: Ask, prefill_answer: Mapping[str, Any]) -> Body:
        raise AssertionError("never in a pair")

    def read(self, answer: object) -> object:
        if not isinstance(answer, dict) or "new" not in answer:
            raise UnreadableAnswer("new", "must be there")
        choice = {
            "index": 0,
            "finish_reason": "length",
            "token_ids": answer["new"],
            "routed_experts": np.array(answer["experts"], np.uint8),
            "sampling_mask": [answer["kept"][str(i)] for i in range(len(answer["new"]))],
        }
        return {"choices": [choice]}

    def events(self) -> VllmEvents:
        return VllmEvents()

    def openai_prefill(self, body: Body) -> Body:
        return body

    def openai_decode(self, body: Body, prefill_answer: Mapping[str, Any]) -> Body:
        return body

    def is_mask_refusal(self, body: Body, status: int, error: object) -> bool:
        return False


def make(model: ModelShape | None) -> PlainDialect:
    """The dialect."""
    return PlainDialect(model)


class PlainEngine(StubEngine):
    """An engine that speaks it."""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/alive")
        async def alive() -> Response:
            return Response()

        @app.post("/continue")
        async def go_on(request: Request) -> Response:
            body = await request.json()
            self.requests.append(body)
            if self.script:
                scripted = self.script.popleft()(body)
                if scripted is not None:
                    return scripted
            new = sampled(body["after"], body["count"])
            tokens = body["after"] + new
            rows = all_layers(true_rows(tokens[:-1]))[body["first_row"] :]
            assert rows.shape[2] == MODEL.top_k
            kept = {str(i): kept_ids(token) for i, token in enumerate(new)}
            return self.json({"new": new, "experts": rows.tolist(), "kept": kept})

        return app
