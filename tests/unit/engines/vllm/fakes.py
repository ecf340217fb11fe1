"""vLLM's token-in/token-out handler as the plugin sees it: names, arguments, order of events.

``tests/vllm`` runs the same plugin in a real server; this one can be stopped at any point.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from sideband.engines.inline import encode_npy_base64
from sideband.engines.vllm.versions import SERVING_CLASS
from sideband.routing import model_shape

HF_CONFIG: dict[str, object] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 1024,
}
MODEL = model_shape(HF_CONFIG)


@dataclass
class SamplingMask:
    token_ids: list[list[int]]


@dataclass
class CompletionOutput:
    index: int
    token_ids: Sequence[int]
    routed_experts: NDArray[Any] | None = None
    finish_reason: str | None = None
    sampling_mask: SamplingMask | None = None


@dataclass
class RequestOutput:
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    finished: bool = True


@dataclass
class SamplingParams:
    n: int = 1
    routed_experts_prompt_start: int = 0
    extra_args: dict[str, Any] | None = None


@dataclass
class GenerateRequest:
    token_ids: list[int]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = "r1"
    stream: bool = False


class GenerateTokensChoice(BaseModel):
    index: int
    finish_reason: str | None = "stop"
    token_ids: list[int] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None


class GenerateTokensResponse(BaseModel):
    request_id: str
    kv_transfer_params: dict[str, Any] | None = None
    output_mode: Literal["tokens"] = "tokens"
    choices: list[GenerateTokensChoice]


class GenerateTokensStreamResponse(BaseModel):
    request_id: str
    choices: list[GenerateTokensChoice]


class ErrorResponse(BaseModel):
    message: str
    kind: str
    status: int


Results = AsyncGenerator[RequestOutput, None]


class FakeServingTokens:
    """The handler; ``engine_client.generate`` is what a test scripts."""

    def __init__(self, engine_client: Any, models: Any = None) -> None:
        self.engine_client, self.models = engine_client, models

    def create_error_response(
        self,
        message: str,
        err_type: str = "BadRequestError",
        status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
    ) -> ErrorResponse:
        return ErrorResponse(message=message, kind=err_type, status=int(status_code))

    async def serve_tokens(self, request: GenerateRequest, raw_request: Any = None) -> Any:
        results = self.engine_client.generate(request)
        asked = (
            request,
            results,
            f"generate-tokens-{request.request_id}",
            "tiny",
            SimpleNamespace(),
        )
        if request.stream:
            return self.serve_tokens_stream_generator(*asked)
        return await self.serve_tokens_full_generator(*asked)

    async def serve_tokens_full_generator(
        self,
        request: GenerateRequest,
        result_generator: Results,
        request_id: str,
        model_name: str,
        request_metadata: Any,
    ) -> ErrorResponse | GenerateTokensResponse:
        final: RequestOutput | None = None
        try:
            async for result in result_generator:
                final = result
        except asyncio.CancelledError:
            return self.create_error_response("Client disconnected")
        assert final is not None
        choices = [GenerateTokensChoice(**_fields(output)) for output in final.outputs]
        return GenerateTokensResponse(request_id=request_id, choices=choices)

    async def serve_tokens_stream_generator(
        self,
        request: GenerateRequest,
        result_generator: Results,
        request_id: str,
        model_name: str,
        request_metadata: Any,
    ) -> AsyncGenerator[str, None]:
        try:
            async for result in result_generator:
                for output in result.outputs:
                    if not output.token_ids and output.finish_reason is None:
                        continue
                    choice = GenerateTokensChoice(**_fields(output))
                    body = GenerateTokensStreamResponse(request_id=request_id, choices=[choice])
                    yield f"data: {body.model_dump_json()}\n\n"
            usage = GenerateTokensStreamResponse(request_id=request_id, choices=[])
            yield f"data: {usage.model_dump_json()}\n\n"
        except Exception as exc:
            yield f"data: {json.dumps({'error': {'message': str(exc)}})}\n\n"
        yield "data: [DONE]\n\n"


def _fields(output: CompletionOutput) -> dict[str, Any]:
    rows, masks = output.routed_experts, output.sampling_mask
    return {
        "index": output.index,
        "finish_reason": output.finish_reason,
        "token_ids": list(output.token_ids),
        "routed_experts": None if rows is None else encode_npy_base64(rows),
        "sampling_mask": None if masks is None else masks.token_ids,
    }


def serving_module() -> ModuleType:
    """A module with the handler under vLLM's name for it."""
    module = ModuleType("serving")
    setattr(module, SERVING_CLASS, FakeServingTokens)
    return module


def vllm_config(**changes: Any) -> Any:
    """As 0.32 lays it out; ``changes`` are attributes of the whole or, by name, of its parts."""
    model_config = SimpleNamespace(
        return_sampling_mask=changes.pop("return_sampling_mask", True),
        logprobs_mode=changes.pop("logprobs_mode", "processed_logprobs"),
        hf_config=SimpleNamespace(to_dict=lambda: changes.get("hf_config", HF_CONFIG)),
    )
    routing = changes.pop("enable_return_routed_experts", True)
    return SimpleNamespace(
        model_config=model_config,
        aux_output_config=SimpleNamespace(enable_return_routed_experts=routing),
        kv_transfer_config=changes.pop("kv_transfer_config", None),
        speculative_config=changes.pop("speculative_config", None),
        use_v2_model_runner=changes.pop("use_v2_model_runner", True),
        parallel_config=SimpleNamespace(_api_process_count=changes.pop("api_processes", 1)),
    )


def rows_of(count: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """Rows of all four layers: distinct experts, zeros in the dense one."""
    random = np.random.default_rng(seed)
    rows = np.argsort(random.random((count, 4, 16)), axis=2)[:, :, :4].astype(np.uint8)
    rows[:, 0] = 0
    return rows


def masks_of(tokens: Sequence[int]) -> list[list[int]]:
    """A kept set for each token."""
    return [sorted({token, (token * 7 + 3) % 1024, 5}) for token in tokens]


@dataclass
class Script:
    """An engine's answer to one request, token by token or whole, and where it waits."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: {0: [11, 12, 13]})
    routing: dict[int, NDArray[np.uint8] | NDArray[np.uint16]] = field(default_factory=dict)
    masks: dict[int, list[list[int]]] = field(default_factory=dict)
    finish_reason: str = "length"
    gate: asyncio.Event | None = None  # generation waits for it
    closed: bool = False

    def generate(self, request: GenerateRequest) -> Results:
        """What ``engine_client.generate`` returns."""
        return self._stream(request) if request.stream else self._whole(request)

    async def _whole(self, request: GenerateRequest) -> Results:
        try:
            if self.gate is not None:
                await self.gate.wait()
            outputs = [self._output(index, len(tokens)) for index, tokens in self.tokens.items()]
            yield RequestOutput(request.token_ids, outputs)
        finally:
            self.closed = True

    async def _stream(self, request: GenerateRequest) -> Results:
        try:
            for index, tokens in self.tokens.items():
                for stop in range(1, len(tokens) + 1):
                    if self.gate is not None and stop == len(tokens):
                        await self.gate.wait()
                    output = self._output(index, stop)
                    output.token_ids = tokens[stop - 1 : stop]
                    if output.sampling_mask is not None:
                        output.sampling_mask = SamplingMask(self.masks[index][stop - 1 : stop])
                    yield RequestOutput(request.token_ids, [output])
        finally:
            self.closed = True

    def _output(self, index: int, stop: int) -> CompletionOutput:
        tokens = self.tokens[index]
        is_last = stop == len(tokens)
        return CompletionOutput(
            index=index,
            token_ids=tokens[:stop],
            routed_experts=self.routing.get(index) if is_last else None,
            finish_reason=self.finish_reason if is_last else None,
            sampling_mask=SamplingMask(self.masks[index][:stop]) if index in self.masks else None,
        )


Prepare = Callable[..., Script]


def script_for(prompt_tokens: int, *, choices: int = 1, start: int = 0) -> Script:
    """Three, four, … tokens per choice with rows from ``start`` on and masks."""
    tokens = {index: [20 + index, 30, *range(40, 41 + index)] for index in range(choices)}
    return Script(
        tokens=tokens,
        routing={
            index: rows_of(prompt_tokens + len(found) - 1 - start, seed=index)
            for index, found in tokens.items()
        },
        masks={index: masks_of(found) for index, found in tokens.items()},
    )
