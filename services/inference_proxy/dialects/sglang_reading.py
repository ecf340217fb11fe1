"""SGLang's ``meta_info`` as vLLM would say it: pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from services.inference_proxy.dialects.base import Body, UnreadableAnswer
from sideband.engines.sglang import ascending_masks, decode_sglang_rows
from sideband.model import ModelShape


def cuts(params: Mapping[str, Any]) -> bool:
    """Whether sampling leaves ids out."""
    top_k, top_p, min_p = params.get("top_k"), params.get("top_p"), params.get("min_p")
    is_greedy = params.get("temperature") == 0
    return is_greedy or (top_k or 0) > 0 or (top_p or 1.0) < 1.0 or (min_p or 0.0) > 0.0


def usage(prompt_tokens: int, completion_tokens: int) -> Body:
    """Token counts of one request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def read_choice(index: int, output_ids: list[Any], meta: Body, model: ModelShape) -> Body:
    """One choice as vLLM gives it. Raises UnreadableAnswer, InvalidInput."""
    reason = meta.get("finish_reason")
    if reason is not None and not isinstance(reason, dict):
        raise UnreadableAnswer("finish_reason", "must be an object")
    reason = reason or {}
    return {
        "index": index,
        "token_ids": output_ids,
        "finish_reason": reason.get("type"),
        "stop_reason": reason.get("matched"),
        "routed_experts": decode_sglang_rows(meta.get("routed_experts"), model),
        "sampling_mask": ascending_masks(meta.get("output_token_sampling_mask")),
        "weight_versions": read_versions(meta.get("weight_versions")),
        "logprobs": read_logprobs(meta),
    }


def read_versions(spans: object) -> object:
    """What the weights of each token are called; numbers are policy versions."""
    is_list = isinstance(spans, list) and all(isinstance(span, dict) for span in spans)
    return spans if is_list else None


def read_logprobs(meta: Body) -> Body | None:
    """``logprobs`` of a choice. With kept sets, of sampling from the set, as vLLM's processed ones.

    Raises UnreadableAnswer.
    """
    pairs = meta.get("output_token_logprobs")
    if pairs is None:
        return None
    entries = _entries(pairs)
    tops = meta.get("output_top_logprobs") or [None] * len(entries)
    selected = meta.get("output_token_sampling_logprobs")
    if len(tops) != len(entries) or (selected is not None and len(selected) != len(entries)):
        raise UnreadableAnswer("output_top_logprobs", "must be as many as tokens")
    content = []
    for place, entry in enumerate(entries):
        own = dict(entry)
        if selected is not None and isinstance(selected[place], (int, float)):
            own["logprob"] = selected[place]
        others = _entries(tops[place] or [])
        ranked = [{**other, "rank": rank} for rank, other in enumerate(others, 1)]
        content.append({**own, "top_logprobs": ranked or [dict(own)]})
    return {"content": content}


def _entries(pairs: object) -> list[Body]:
    """``[logprob, token id, text or null]`` each."""
    if not isinstance(pairs, list):
        raise UnreadableAnswer("output_token_logprobs", "must be a list")
    entries: list[Body] = []
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) < 2 or type(pair[1]) is not int:
            raise UnreadableAnswer("output_token_logprobs", "must be pairs of logprob and id")
        entries.append({"token_id": pair[1], "logprob": pair[0], "rank": None})
    return entries
