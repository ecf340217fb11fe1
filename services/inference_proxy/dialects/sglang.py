"""SGLang's native ``/generate``, as version 0.5.23 reads and writes it.

Its answers hold everything under ``meta_info``: ``routed_experts`` as base64 of bare int32 ids
[rows, all decoder layers, top-k] without a shape, so the model's config is needed; kept sets as
``output_token_sampling_mask``, by weight and not by id. Both are asked for request by request;
masks only of sampling that cuts the vocabulary, since the server ends a request whose kept set
outgrows its ``--sampling-mask-max-tokens``.
"""

from collections.abc import Mapping
from typing import Any, Final

from services.inference_proxy.dialects import sglang_openai
from services.inference_proxy.dialects.base import (
    Ask,
    Body,
    UnreadableAnswer,
    UntranslatableParameter,
    WeightSteps,
    WeightUpdate,
)
from services.inference_proxy.dialects.load import ModelNeeded
from services.inference_proxy.dialects.sglang_reading import cuts, read_choice, usage
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
    identity_path: str | None = None
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

    def openai_train(self, body: Body, path: str, ask: Ask) -> Body:
        """With token ids, log probabilities, rows and, in a chat, kept sets."""
        return sglang_openai.train(body, path, ask)

    def openai_prefill(self, body: Body) -> Body:
        """Never called: see ``decode_continues_prefill``."""
        raise AssertionError("SGLang engines make no pair")

    def openai_decode(self, body: Body, prefill_answer: Mapping[str, Any]) -> Body:
        """Never called: see ``decode_continues_prefill``."""
        raise AssertionError("SGLang engines make no pair")

    def read_openai(self, answer: object, path: str) -> object:
        """A chat's choices bring all that ``/generate`` tells; a completion's rows stand apart."""
        return sglang_openai.read(answer, path, self._model)

    def openai_shown(self, answer: Body, asked: Body) -> Body:
        """Without what only the proxy wanted."""
        return sglang_openai.shown(answer, asked)

    def is_mask_refusal(self, body: Body, status: int, error: object) -> bool:
        """It says itself what it cannot do, with a 400."""
        return False

    def weight_steps(self, update: WeightUpdate) -> WeightSteps:
        """Not written yet: report the version once the weights were brought by other means."""
        raise UntranslatableParameter("engines", "sglang engines get their weights elsewhere")


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


def _parts(item: object) -> tuple[list[Any], Body]:
    """The tokens and the rest of one choice. Raises UnreadableAnswer."""
    output_ids = item.get("output_ids") if isinstance(item, dict) else None
    meta = item.get("meta_info") if isinstance(item, dict) else None
    if not isinstance(output_ids, list) or not isinstance(meta, dict):
        raise UnreadableAnswer("answer", "must have output_ids and meta_info")
    return output_ids, meta
