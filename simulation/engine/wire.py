"""Bodies of ``POST /inference/v1/generate`` as vLLM 0.32 reads and writes them.

Unknown keys are ignored in silence, as the real server does; a client that misspells a key gets
the default.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from sideband.model import VOCAB_SIZE_MAX

TOKENS_MAX: Final = 1 << 20
CHOICES_MAX: Final = 64
REQUEST_ID_PREFIX: Final = "generate-tokens-"

Json = dict[str, Any]


class BadRequest(Exception):
    """A 400 in vLLM's form. ``message`` is what its client sees."""

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)


class SamplingParams(msgspec.Struct, kw_only=True):
    """The sampling keys that matter here."""

    max_tokens: int = 16
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    routed_experts_prompt_start: int = 0
    truncate_prompt_tokens: int | None = None
    extra_args: dict[str, Any] | None = None

    @property
    def asks_scores(self) -> bool:
        """Whether the logprobs of the kept ids are wanted."""
        return (self.extra_args or {}).get("sampling_mask_logprobs") is True


class GenerateRequest(msgspec.Struct, kw_only=True):
    """One request."""

    token_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    request_id: str | None = None
    model: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


_DECODER: Final = msgspec.json.Decoder(GenerateRequest)


def parse(body: bytes, *, vocab_size: int) -> GenerateRequest:
    """A request that can be run. Raises BadRequest."""
    try:
        request = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadRequest(str(exc)) from exc
    params = request.sampling_params
    rules = (
        (0 < len(request.token_ids) <= TOKENS_MAX, "token_ids must not be empty"),
        (vocab_size <= VOCAB_SIZE_MAX, "the vocabulary is too large"),
        (
            all(0 <= token < vocab_size for token in request.token_ids),
            "token_ids out of vocabulary",
        ),
        (1 <= params.max_tokens <= TOKENS_MAX, "max_tokens must be at least 1"),
        (0 <= params.min_tokens <= params.max_tokens, "min_tokens must lie in [0, max_tokens]"),
        (1 <= params.n <= CHOICES_MAX, f"n must lie in [1, {CHOICES_MAX}]"),
        (params.temperature >= 0, "temperature must not be negative"),
        (0 < params.top_p <= 1, "top_p must lie in (0, 1]"),
        (params.top_k >= -1, "top_k must be -1, 0 or positive"),
        (
            0 <= params.routed_experts_prompt_start <= len(request.token_ids),
            "routed_experts_prompt_start must lie in the prompt",
        ),
    )
    for holds, message in rules:
        if not holds:
            raise BadRequest(message)
    return request


def error_body(status: int, message: str, kind: str) -> Json:
    """vLLM's error form."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Json:
    """Token counts of one request."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": None,
    }


def answer(
    *,
    request_id: str,
    model: str,
    choices: Sequence[Json],
    counts: Json,
    kv_transfer_params: Mapping[str, Any] | None,
    handle: Mapping[str, Any],
) -> Json:
    """A whole answer; ``handle`` holds the fields that the plugin adds at the top level."""
    return {
        "request_id": request_id,
        "model": model,
        "created": int(time.time()),
        "usage": counts,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "kv_transfer_params": kv_transfer_params,
        "output_mode": "tokens",
        "choices": list(choices),
        **handle,
    }


def logprob_content(token_ids: Sequence[int], logprobs: Sequence[float]) -> Json:
    """``choices[i].logprobs`` of 0.32: ids and numbers, no strings."""
    content = []
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        entry: Json = {"token_id": token_id, "logprob": logprob, "rank": 1}
        content.append({**entry, "top_logprobs": [entry]})
    return {"content": content}
