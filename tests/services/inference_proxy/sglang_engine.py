"""A small engine that speaks SGLang's ``/generate``, in the shapes of version 0.5.23's source.

Members and types are those that its tokenizer manager writes; what they say is the stub's truth.
"""

import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from tests.services.inference_proxy.stub import Json, StubEngine
from tests.services.inference_proxy.stub_model import (
    ALPHABET,
    all_layers,
    kept_ids,
    rendered,
    sampled,
    true_rows,
)

DEFAULT_TOKENS = 128


def logprob(token: int) -> float:
    """Of a token among all."""
    return -0.5 - token / 64


def kept_logprob(token: int) -> float:
    """Of a token among those that were kept."""
    return -0.25 - token / 64


@dataclass(slots=True)
class SglangEngine(StubEngine):
    """``is_incremental``: the server's ``--incremental-streaming-output``."""

    dialect: str = "sglang"
    is_incremental: bool = False

    def app(self) -> FastAPI:
        """Its HTTP face."""
        app = FastAPI()

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=200 if self.is_healthy else 503)

        @app.post("/generate")
        async def generate(request: Request) -> Response:
            body = await request.json()
            self.requests.append(body)
            if self.script:
                scripted = self.script.popleft()(body)
                if scripted is not None:
                    return scripted
            items = [self.item(body, index) for index in range(body["sampling_params"].get("n", 1))]
            if body["stream"]:
                return StreamingResponse(self.parts(items), media_type="text/event-stream")
            return self.json(items if len(items) > 1 else items[0])

        @app.post("/v1/chat/completions")
        @app.post("/v1/completions")
        async def openai(request: Request) -> Response:
            body = await request.json()
            self.requests.append(body)
            return self.json(self.openai_answer(body))

        return app

    def openai_answer(self, body: Json) -> Json:
        """A chat's choices with ``meta_info``; a completion's rows once, in ``sglext``."""
        prompt, is_chat = rendered(body), "messages" in body
        params = {"max_new_tokens": body["max_tokens"]}
        asked = {**body, "input_ids": prompt, "sampling_params": params}
        asked |= {"routed_experts_start_len": 0, "return_logprob": True}
        choices = []
        items = [self.item(asked, index) for index in range(body.get("n", 1))]
        for index, item in enumerate(items):
            tokens, meta = item["output_ids"], item["meta_info"]
            text = "".join(ALPHABET[token] for token in tokens)
            choice: Json = {"index": index, "finish_reason": "length", "matched_stop": None}
            if body.get("return_token_ids"):
                choice |= {"prompt_token_ids": prompt}
                choice["response_token_ids" if is_chat else "token_ids"] = tokens
            entries = [{"token": ALPHABET[t], "logprob": logprob(t)} for t in tokens]
            if is_chat:
                choice |= {"message": {"role": "assistant", "content": text}}
                choice["logprobs"] = {"content": entries}
                if body.get("return_meta_info"):
                    choice["meta_info"] = meta
            else:
                choice |= {"text": text}
                choice["logprobs"] = {"token_logprobs": [logprob(t) for t in tokens]}
            choices.append(choice)
        answer: Json = {"id": body["rid"], "model": "m", "choices": choices, "usage": {}}
        if body.get("return_routed_experts"):
            answer["sglext"] = {"routed_experts": items[0]["meta_info"]["routed_experts"]}
        return answer

    def item(self, body: Json, index: int) -> Json:
        """One choice."""
        prompt, params = body["input_ids"], body["sampling_params"]
        new = sampled(prompt, params.get("max_new_tokens", DEFAULT_TOKENS))
        meta: Json = {
            "id": body["rid"] if index == 0 else f"{body['rid']}_{index}",
            "finish_reason": {"type": "length", "length": len(new)},
            "prompt_tokens": len(prompt),
            "weight_version": "default",
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": len(new),
            "cached_tokens": 0,
            "dp_rank": None,
            "e2e_latency": 0.01,
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[logprob(token), token, None] for token in new]
            meta["output_token_logprobs_length"] = len(new)
            if body.get("top_logprobs_num"):
                tops = [[[logprob(t), t, None]] for t in new]
                meta["output_top_logprobs"] = [*tops[:-1], None] if len(tops) > 1 else tops
        if body.get("return_sampling_mask"):
            # By weight: the sampled one, which weighs most here, comes first.
            meta["output_token_sampling_mask"] = [
                [token, *(k for k in kept_ids(token) if k != token)] for token in new
            ]
            meta["output_token_sampling_logprobs"] = [kept_logprob(token) for token in new]
            meta["output_token_sampling_mask_length"] = len(new)
        if body.get("return_routed_experts"):
            rows = all_layers(true_rows([*prompt, *new][:-1]))
            rows = rows[body["routed_experts_start_len"] if self.obeys else 0 :]
            meta["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()
        return {"text": "", "output_ids": new, "meta_info": meta}

    async def parts(self, items: list[Json]) -> AsyncIterator[bytes]:
        """Two tokens an event; everything so far again, unless the server is incremental."""
        lists = ("output_token_logprobs", "output_token_sampling_mask")
        for index, item in enumerate(items):
            total, meta = len(item["output_ids"]), item["meta_info"]
            for stop in range(2, total + 2, 2):
                window = slice(stop - 2 if self.is_incremental else 0, min(stop, total))
                part: Json = {**meta, "completion_tokens": min(stop, total)}
                for name in (*lists, "output_token_sampling_logprobs", "output_top_logprobs"):
                    if name in meta:
                        part[name] = meta[name][window]
                if stop < total:
                    part["finish_reason"] = None
                    part.pop("routed_experts", None)
                event = {"text": "", "output_ids": item["output_ids"][window], "meta_info": part}
                if len(items) > 1:
                    event["index"] = index
                yield b"data: " + orjson.dumps(event) + b"\n\n"
        yield b"data: [DONE]\n\n"


def rows_text(ids: Any) -> str:
    """``routed_experts`` of any array of ids."""
    return base64.b64encode(np.asarray(ids, "<i4").tobytes()).decode()
