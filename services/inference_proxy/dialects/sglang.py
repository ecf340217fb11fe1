"""SGLang's native ``/generate``, as version 0.5.23 reads and writes it.

Its answers hold everything under ``meta_info``: ``routed_experts`` as base64 of bare int32 ids
[rows, all decoder layers, top-k] without a shape, so the model's config is needed; kept sets as
``output_token_sampling_mask``, by weight and not by id. Both are asked for request by request;
masks only of sampling that cuts the vocabulary, since the server ends a request whose kept set
outgrows its ``--sampling-mask-max-tokens``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from services.inference_proxy.dialects.base import (
    Ask,
    Body,
    UnreadableAnswer,
    UntranslatableParameter,
)
from services.inference_proxy.dialects.load import ModelNeeded
from sideband.engines.sglang import ascending_masks, decode_sglang_rows
from sideband.model import ModelShape

_SAME: Final = frozenset(
    {
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "min_p",
        "n",
        "presence_penalty",
        "repetition_penalty",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_p",
    }
)
_RENAMED: Final[Mapping[str, str]] = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
# Asked for elsewhere in the body, or about text that nobody reads on this route.
_NO_SAMPLING: Final = frozenset(
    {
        "detokenize",
        "include_stop_str_in_output",
        "logprobs",
        "routed_experts_prompt_start",
        "top_k",
    }
)
_BODY: Final = frozenset({"cache_salt", "priority"})
_BODY_DROPPED: Final = frozenset(
    {"model", "output_mode", "request_id", "return_token_ids", "sampling_params", "stream"}
    | {"stream_options", "token_ids"}
)


class SglangDialect:
    """Prefill's token is decode's first one there, so its engines make no pair here."""

    name = "sglang"
    generate_path = "/generate"
    health_path = "/health"
    decode_continues_prefill = True

    def __init__(self, model: ModelShape) -> None:
        self._model = model

    def whole(self, body: Body, ask: Ask) -> Body:
        """Its own names. Raises UntranslatableParameter for what it does not have."""
        params = body["sampling_params"]
        asked: Body = {
            "rid": ask.request_id,
            "input_ids": body["token_ids"],
            "sampling_params": sampling_params(params),
            "stream": bool(body.get("stream")),
        }
        for name, value in body.items():
            if name in _BODY and value is not None:
                asked[name] = value
            elif name not in _BODY | _BODY_DROPPED and value is not None:
                raise UntranslatableParameter(name, "is not known to SGLang")
        if params.get("logprobs") is not None:
            asked |= {"return_logprob": True, "top_logprobs_num": params["logprobs"]}
        if ask.wants_rows:
            asked["return_routed_experts"] = True
            asked["routed_experts_start_len"] = ask.prompt_start
            asked["return_sampling_mask"] = cuts(params)
        return asked

    def prefill(self, body: Body, ask: Ask) -> Body:
        """Never called: see ``decode_continues_prefill``."""
        raise AssertionError("SGLang engines make no pair")

    def decode(self, body: Body, ask: Ask, prefill_answer: Mapping[str, Any]) -> Body:
        """Never called: see ``decode_continues_prefill``."""
        raise AssertionError("SGLang engines make no pair")

    def read(self, answer: object) -> object:
        """One object, or a list of one for each choice."""
        items = answer if isinstance(answer, list) and answer else [answer]
        choices = []
        for index, item in enumerate(items):
            output_ids, meta = _parts(item)
            choices.append(read_choice(index, output_ids, meta, self._model))
        first = _parts(items[0])[1]
        counts = [_parts(item)[1].get("completion_tokens") or 0 for item in items]
        return {
            "request_id": first.get("id"),
            "usage": usage(first.get("prompt_tokens") or 0, sum(counts)),
            "prompt_logprobs": None,
            "kv_transfer_params": None,
            "output_mode": "tokens",
            "choices": choices,
        }

    def events(self) -> "SglangEvents":
        """Events may repeat all that came before."""
        return SglangEvents(self._model)

    def openai_prefill(self, body: Body) -> Body:
        """Never called: see ``decode_continues_prefill``."""
        raise AssertionError("SGLang engines make no pair")

    def openai_decode(self, body: Body, prefill_answer: Mapping[str, Any]) -> Body:
        """Never called: see ``decode_continues_prefill``."""
        raise AssertionError("SGLang engines make no pair")

    def is_mask_refusal(self, body: Body, status: int, error: object) -> bool:
        """It says itself what it cannot do, with a 400."""
        return False


class SglangEvents:
    """One stream. Whether an event repeats or continues is told by its count of tokens."""

    def __init__(self, model: ModelShape) -> None:
        self._model = model
        self._seen: dict[int, int] = {}

    def read(self, event: Body) -> Body:
        """The tokens that are new in it, and what belongs to them."""
        output_ids, meta = _parts(event)
        index, total = event.get("index", 0), meta.get("completion_tokens")
        if type(index) is not int or type(total) is not int:
            raise UnreadableAnswer("completion_tokens", "must be a number, as must index")
        new = total - self._seen.get(index, 0)
        if not 0 <= new <= len(output_ids):
            rule = f"{total} tokens in all do not go on from {self._seen.get(index, 0)}"
            raise UnreadableAnswer("completion_tokens", rule)
        self._seen[index] = total
        lists = {
            name: value[len(value) - new :] if isinstance(value, list) else value
            for name, value in meta.items()
            if name.startswith("output_t")
        }
        choice = read_choice(
            index, output_ids[len(output_ids) - new :], {**meta, **lists}, self._model
        )
        return {
            "request_id": meta.get("id"),
            "usage": None,
            "output_mode": "tokens",
            "choices": [choice],
        }


def make(model: ModelShape | None) -> SglangDialect:
    """Raises ModelNeeded: its rows come without a shape."""
    if model is None:
        raise ModelNeeded("dialect sglang")
    return SglangDialect(model)


def sampling_params(params: Mapping[str, Any]) -> Body:
    """vLLM's sampling parameters by SGLang's names. Raises UntranslatableParameter."""
    found: Body = {}
    for name, value in params.items():
        if value is None or name in _NO_SAMPLING or (name == "extra_args" and not value):
            continue
        if name not in _SAME and name not in _RENAMED:
            raise UntranslatableParameter(f"sampling_params.{name}", "is not known to SGLang")
        found[_RENAMED.get(name, name)] = value
    if params.get("top_k") is not None:
        found["top_k"] = params["top_k"] if params["top_k"] > 0 else -1  # 0 is no limit for vLLM
    return found


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
    """Policy versions by token, where the weights are named by numbers."""
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        return None
    return spans if all(str(span.get("version")).isdecimal() for span in spans) else None


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


def _parts(item: object) -> tuple[list[Any], Body]:
    """The tokens and the rest of one choice. Raises UnreadableAnswer."""
    output_ids = item.get("output_ids") if isinstance(item, dict) else None
    meta = item.get("meta_info") if isinstance(item, dict) else None
    if not isinstance(output_ids, list) or not isinstance(meta, dict):
        raise UnreadableAnswer("answer", "must have output_ids and meta_info")
    return output_ids, meta
