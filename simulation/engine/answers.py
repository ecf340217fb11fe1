"""Outcomes as the JSON that vLLM sends: whole, or as a stream of blocks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sideband.engines.inline import encode_mask_logprobs, encode_npy_base64, encode_sampling_mask
from sideband.model import ModelShape
from sideband.routing.rows import scatter_layers
from simulation.engine.outcomes import Outcome
from simulation.engine.wire import GenerateRequest, Json, logprob_content, usage

STREAM_BLOCK_TOKENS = 4
VersionSpans = list[dict[str, Any]]


def choice_body(
    outcome: Outcome,
    request: GenerateRequest,
    model: ModelShape,
    *,
    is_inline: bool,
    versions: VersionSpans,
) -> Json:
    """One choice. Inline it carries every layer's rows, zeros where there is no router."""
    body = block_body(outcome, request, 0, len(outcome.token_ids_C), with_masks=is_inline)
    body |= {"finish_reason": outcome.finish_reason, "stop_reason": outcome.stop_reason}
    body["weight_versions"] = versions
    if is_inline:
        rows = scatter_layers(outcome.routing_NLK, model.layer_ids, model.num_layers)
        body["routed_experts"] = encode_npy_base64(rows)
    return body


def block_body(
    outcome: Outcome, request: GenerateRequest, start: int, stop: int, *, with_masks: bool
) -> Json:
    """Completion tokens [start, stop) of a choice, without what only its end carries."""
    token_ids = outcome.token_ids_C[start:stop].tolist()
    logprobs = None
    if request.sampling_params.logprobs is not None:
        logprobs = logprob_content(token_ids, outcome.logprobs_C[start:stop].tolist())
    masks = outcome.masks.slice(start, stop) if len(outcome.masks) else outcome.masks
    body: Json = {
        "index": outcome.index,
        "finish_reason": None,
        "stop_reason": None,
        "token_ids": token_ids,
        "routed_experts": None,
        "sampling_mask": encode_sampling_mask(masks) if with_masks and len(masks) else None,
        "weight_versions": None,
        "logprobs": logprobs,
    }
    if with_masks and outcome.scores is not None and len(masks):
        body["sampling_mask_logprobs"] = encode_mask_logprobs(outcome.scores.slice(start, stop))
    return body


def stream_bodies(
    request_id: str,
    request: GenerateRequest,
    outcomes: Sequence[Outcome],
    last_choices: Sequence[Json],
    handle: Mapping[str, Any],
) -> Iterator[Json]:
    """Blocks of a streamed answer: masks in each, routing whole in a choice's last one.

    ``last_choices`` are the whole choices; of them the last block takes what only the end knows.
    The segments by handle come with the very last block.
    """
    is_inline = not handle
    for position, (outcome, whole) in enumerate(zip(outcomes, last_choices, strict=True)):
        tokens = len(outcome.token_ids_C)
        for start in range(0, tokens, STREAM_BLOCK_TOKENS):
            stop = min(start + STREAM_BLOCK_TOKENS, tokens)
            block = block_body(outcome, request, start, stop, with_masks=is_inline)
            extra: Mapping[str, Any] = {}
            if stop == tokens:
                ends = ("finish_reason", "stop_reason", "routed_experts", "weight_versions")
                block |= {name: whole[name] for name in ends}
                extra = handle if position == len(outcomes) - 1 else {}
            yield {
                "request_id": request_id,
                "usage": None,
                "output_mode": "tokens",
                "choices": [block],
                **extra,
            }
    if (request.stream_options or {}).get("include_usage"):
        counts = usage(len(request.token_ids), sum(len(o.token_ids_C) for o in outcomes), 0)
        yield {"request_id": request_id, "usage": counts, "output_mode": "tokens", "choices": []}
