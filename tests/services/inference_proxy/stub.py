"""A small engine for the tests. ``stub_model`` says what it answers."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from numpy.typing import NDArray

from sideband.engines.inline import encode_npy_base64
from sideband.ids import RequestId, RunId
from sideband.masks.rows import MaskRows
from sideband.payload.columns import ChoicePayload, MaskColumn, RoutingRows
from sideband.payload.root import PayloadRoot
from sideband.payload.writer import write_payload
from tests.services.inference_proxy.stub_model import (
    ALPHABET,
    GARBAGE,
    MODEL,
    all_layers,
    kept_ids,
    logprob_of,
    rendered,
    sampled,
    scores_of,
    true_rows,
)

CHOICES_MAX = 8

Json = dict[str, Any]
Script = Callable[[Json], Response | None]


@dataclass(slots=True)
class StubEngine:
    """One engine. ``script`` answers the next requests instead of it, one function each."""

    role: str = "colocated"
    root: Path | None = None
    by_handle: bool = True  # False: a server without the plugin
    dialect: str = "vllm"
    spills: bool = False  # such a server, whose files the proxy writes
    scores: bool = False  # it reports logprobs of the kept ids
    requests: list[Json] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    script: deque[Script] = field(default_factory=deque)
    hold: asyncio.Event | None = None  # answers wait for it
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: int = 0
    tells_tokens: bool = True  # on OpenAI routes, when asked
    is_healthy: bool = True
    hangs_until: asyncio.Event | None = None  # a probe is answered no earlier
    identity: Json | None = None  # what it says of itself; None: it has no such route
    identity_status: int = 200  # with it
    process: str | None = None  # of the plugin, in its identity and its answers
    started_s: float | None = None  # what its metrics say; None: it has no such route
    metrics_status: int = 200  # with them
    asked: list[str] = field(default_factory=list)  # questions that came
    obeys: bool = True
    admin_calls: list[tuple[str, Any]] = field(default_factory=list)  # path with query, body
    broken_paths: set[str] = field(default_factory=set)
    keeps_cache: bool = False  # its prefix cache cannot be emptied

    def app(self) -> FastAPI:
        """Its HTTP face."""
        app = FastAPI()

        @app.get("/health")
        async def health() -> Response:
            if self.hangs_until is not None:
                await self.hangs_until.wait()
            return Response(status_code=200 if self.is_healthy else 503)

        @app.get("/inference/v1/sideband")
        async def identity() -> Response:
            self.asked.append("identity")
            if self.identity is None:
                return self.json({}, 404)
            signed = {} if self.process is None else {"engine_process": self.process}
            return self.json({**self.identity, **signed}, self.identity_status)

        @app.get("/metrics/")
        async def metrics(request: Request) -> Response:
            self.asked.append("metrics")
            if self.started_s is None:
                return self.json({}, 404)
            assert request.query_params.getlist("name[]") == ["process_start_time_seconds"]
            name = "process_start_time_seconds"
            text = f"# TYPE {name} gauge\n{name} {self.started_s}\n"
            return Response(text, self.metrics_status)

        @app.get("/v1/models")
        async def models() -> Response:
            return self.json({"data": [{"id": "stub"}]})

        @app.post("/v1/chat/completions")
        @app.post("/v1/completions")
        @app.post("/inference/v1/generate")
        async def post(request: Request) -> Response:
            return await self.answer(request)

        @app.post("/{path}")
        async def admin(path: str, request: Request) -> Response:
            return await self.administered(path, request)

        return app

    async def administered(self, path: str, request: Request) -> Response:
        """Routes for RL: remembered, and answered as vLLM does."""
        content = await request.body()
        query = f"?{request.url.query}" if request.url.query else ""
        self.admin_calls.append((f"/{path}{query}", orjson.loads(content) if content else None))
        if f"/{path}" in self.broken_paths:
            return self.json({"error": "no"}, 500)
        return self.json({"success": not (self.keeps_cache and path == "reset_prefix_cache")})

    @staticmethod
    def json(body: Any, status: int = 200) -> Response:
        """A JSON answer with hop-by-hop and other headers that must not pass."""
        headers = {"keep-alive": "timeout=99", "x-engine": "stub", "set-cookie": "a=b"}
        return Response(orjson.dumps(body), status, headers, "application/json")

    async def answer(self, request: Request) -> Response:
        """Scripted, or true."""
        body = orjson.loads(await request.body())
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.arrived.set()
        await self._held(request)
        if self.script:
            scripted = self.script.popleft()(body)
            if scripted is not None:
                return scripted
        if "token_ids" not in body:
            return self.openai(body)
        whole = await asyncio.to_thread(self.generate, body)
        if not body.get("stream"):
            return self.json(whole)
        return StreamingResponse(self.events(whole), media_type="text/event-stream")

    async def _held(self, request: Request) -> None:
        if self.hold is None:
            return
        held = asyncio.create_task(self.hold.wait())
        gone = asyncio.create_task(_left(request))
        await asyncio.wait({held, gone}, return_when=asyncio.FIRST_COMPLETED)
        self.cancelled += not held.done()
        for task in (held, gone):
            task.cancel()
        await asyncio.gather(held, gone, return_exceptions=True)

    def generate(self, body: Json) -> Json:
        """A whole answer, its file written when a payload_dir came."""
        prompt, params = body["token_ids"], body["sampling_params"]
        choices, payloads = [], []
        for index in range(min(params.get("n", 1), CHOICES_MAX)):
            completion = sampled(prompt, params.get("max_tokens", 4))
            tokens = prompt + completion
            start = params.get("routed_experts_prompt_start", 0) if self.obeys else 0
            rows = true_rows(tokens[:-1])
            if self.role == "decode":
                rows[: len(prompt)] = (rows[: len(prompt)] + GARBAGE) % MODEL.id_space
            rows = rows[start:]
            masks = [kept_ids(token) for token in completion]
            scores = [scores_of(ids) for ids in masks] if self.scores else None
            payloads.append(_payload(index, start, rows, len(prompt), masks, completion, scores))
            choices.append(
                {
                    "index": index,
                    "finish_reason": "length",
                    "token_ids": completion,
                    "routed_experts": encode_npy_base64(all_layers(rows)),
                    "sampling_mask": masks,
                    **({} if scores is None else {"sampling_mask_logprobs": scores}),
                }
            )
            if params.get("logprobs") is not None:
                entries = [{"token_id": t, "logprob": logprob_of(t), "rank": 1} for t in completion]
                choices[-1]["logprobs"] = {"content": entries}
        answer: Json = {
            "request_id": f"generate-tokens-{body['request_id']}",
            "choices": choices,
            "kv_transfer_params": None,
        }
        if self.process is not None:
            answer["engine_process"] = self.process
        extra = params.get("extra_args") or {}
        if (extra.get("kv_transfer_params") or {}).get("do_remote_decode"):
            answer["kv_transfer_params"] = {"do_remote_prefill": True, "remote_host": "prefill"}
        assert not (self.spills and "payload_dir" in extra), "it would not understand it"
        if "payload_dir" in extra and self.by_handle:
            answer |= self.written(extra, body["request_id"], payloads)
            for choice in [] if extra.get("payload_debug") else choices:
                choice["routed_experts"] = choice["sampling_mask"] = None
                choice.pop("sampling_mask_logprobs", None)
        return answer

    def written(self, extra: Json, request_id: str, payloads: list[ChoicePayload]) -> Json:
        """Write the file; the members that name it."""
        assert self.root is not None
        folder = Path(extra["payload_dir"])
        report = write_payload(
            PayloadRoot.open(self.root, run_id=RunId(extra["payload_run_id"])),
            policy_version=int(folder.name[1:]),
            request_id=RequestId(request_id),
            model=MODEL,
            choices=payloads,
        )
        segments = {str(k): msgspec.to_builtins(list(v)) for k, v in report.segments.items()}
        return {"payload_segments": segments, "payload_model": msgspec.to_builtins(MODEL)}

    async def events(self, whole: Json) -> Any:
        """An answer as vLLM streams it: tokens one by one, rows with the last."""
        late = {"choices", "payload_segments", "engine_process"}
        top = {k: v for k, v in whole.items() if k not in late}
        for choice in whole["choices"]:
            last = len(choice["token_ids"]) - 1
            for i, token in enumerate(choice["token_ids"]):
                part = {**choice, "token_ids": [token], "finish_reason": None}
                if "logprobs" in choice:
                    part["logprobs"] = {"content": [choice["logprobs"]["content"][i]]}
                part["routed_experts"] = None
                masks = choice["sampling_mask"]
                part["sampling_mask"] = None if masks is None else [masks[i]]
                if "sampling_mask_logprobs" in choice:
                    part["sampling_mask_logprobs"] = [choice["sampling_mask_logprobs"][i]]
                event = {**top, "choices": [part]}
                if i == last:
                    part |= {
                        "finish_reason": "length",
                        "routed_experts": choice["routed_experts"],
                    }
                    if choice is whole["choices"][-1]:
                        event |= {name: whole[name] for name in late & whole.keys() - {"choices"}}
                yield b"data: " + orjson.dumps(event) + b"\n\n"
        yield b"data: " + orjson.dumps({"choices": [], "usage": {"total_tokens": 9}}) + b"\n\n"
        yield b"data: [DONE]\n\n"

    def told(self, body: Json) -> Json:
        """The same answer as on the generate route, with its text."""
        prompt, is_chat = rendered(body), "messages" in body
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 4
        extra = {**(body.get("vllm_xargs") or {})}
        if body.get("kv_transfer_params"):
            extra["kv_transfer_params"] = body["kv_transfer_params"]
        params = {
            "max_tokens": limit,
            "n": body.get("n") or 1,
            "routed_experts_prompt_start": body.get("routed_experts_prompt_start", 0),
            "extra_args": {name: extra[name] for name in extra if name != "payload_dir"},
        }
        if self.role == "decode":
            assert params["routed_experts_prompt_start"] >= len(prompt), "a real one would die"
        asked = {"token_ids": prompt, "sampling_params": params, "request_id": "openai"}
        whole = self.generate(asked)
        choices = []
        for choice in whole["choices"]:
            tokens = choice["token_ids"]
            text = "".join(ALPHABET[token] for token in tokens)
            own: Json = {
                "index": choice["index"],
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": tokens,
                "routed_experts": choice["routed_experts"],
            }
            if is_chat:
                own["message"] = {"role": "assistant", "content": text}
                entries = [{"token": ALPHABET[t], "logprob": logprob_of(t)} for t in tokens]
                own["logprobs"] = {"content": entries} if body.get("logprobs") else None
            else:
                own |= {"text": text, "prompt_token_ids": prompt}
                values = {"token_logprobs": [logprob_of(t) for t in tokens]}
                own["logprobs"] = values if body.get("logprobs") is not None else None
            choices.append(own)
        return {
            "id": "engine-id",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 1,
            "model": body.get("model"),
            "choices": choices,
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": limit, "total_tokens": 0},
            "kv_transfer_params": whole["kv_transfer_params"],
            **({"prompt_token_ids": prompt} if is_chat else {}),
        }

    def openai(self, body: Json) -> Response:
        """An OpenAI answer; with tokens and rows when they are asked for, as vLLM gives them."""
        if body.get("return_token_ids") and self.tells_tokens:
            return self.json(self.told(body))
        if not body.get("stream"):
            answer: Json = {"object": "chat.completion", "model": body.get("model")}
            if body.get("kv_transfer_params"):
                answer["kv_transfer_params"] = {"do_remote_prefill": True}
            return self.json(answer)

        async def parts() -> Any:
            yield b'data: {"delta": "a"}\n\n'
            yield b"data: [DONE]\n\n"

        return StreamingResponse(parts(), media_type="text/event-stream")


async def _left(request: Request) -> None:
    """Returns when the caller has closed its connection."""
    await request.receive()


def _payload(
    index: int,
    start: int,
    rows: NDArray[np.uint8],
    prompt_tokens: int,
    masks: list[list[int]],
    completion: list[int],
    scores: list[list[float]] | None,
) -> ChoicePayload:
    starts = np.cumsum([0, *(len(ids) for ids in masks)]).astype(np.int64)
    flat = np.asarray([token for ids in masks for token in ids], np.int32)
    return ChoicePayload(
        choice=index,
        routing=RoutingRows(pos=start, rows_NLK=rows),
        masks=MaskColumn(
            pos=prompt_tokens,
            masks=MaskRows(starts, flat),
            sampled_token_ids_N=np.asarray(completion, np.int32),
            logprobs_M=None
            if scores is None
            else np.asarray([score for row in scores for score in row], np.float32),
        ),
    )
