"""What dialects share about OpenAI routes: pure."""

from collections.abc import Sequence
from typing import Any, Final

from services.inference_proxy.dialects.base import Body, UnreadableAnswer

CHAT: Final = "/v1/chat/completions"
_TOP: Final = (
    "kv_transfer_params",
    "payload_model",
    "payload_segments",
    "routed_layer_ids",
    "usage",
)


def is_chat(path: str) -> bool:
    """Chat, and not a completion of plain text."""
    return path == CHAT


def wants_logprobs(asked: Body) -> bool:
    """Whether the client asked for log probabilities; 0 asks a completion for them."""
    value = asked.get("logprobs")
    return value is True or type(value) is int


def without(body: Body, *names: str) -> Body:
    """The body without these members."""
    return {name: value for name, value in body.items() if name not in names}


def read_openai(answer: object) -> Body:
    """An OpenAI answer with token ids, as vLLM gives it, in the form of the generate route.

    Raises UnreadableAnswer.
    """
    body, raw_choices = parts_of(answer)
    prompt = body.get("prompt_token_ids")
    choices = []
    for raw in raw_choices:
        prompt = raw.get("prompt_token_ids") if prompt is None else prompt
        choices.append(
            {
                "index": raw.get("index"),
                "token_ids": raw.get("token_ids"),
                "finish_reason": raw.get("finish_reason"),
                "stop_reason": raw.get("stop_reason"),
                "routed_experts": raw.get("routed_experts"),
                "sampling_mask": raw.get("sampling_mask"),
                "weight_versions": raw.get("weight_versions"),
                "logprobs": plain_logprobs(raw.get("logprobs"), raw.get("token_ids")),
            }
        )
    return {
        **{name: body[name] for name in _TOP if body.get(name) is not None},
        "prompt_token_ids": prompt,
        "choices": choices,
    }


def parts_of(answer: object) -> tuple[Body, list[Body]]:
    """The answer and its choices, objects all. Raises UnreadableAnswer."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(answer, dict) or not isinstance(choices, list) or not choices:
        raise UnreadableAnswer("choices", "must be a list with at least one choice")
    if not all(isinstance(choice, dict) for choice in choices):
        raise UnreadableAnswer("choices", "must be objects")
    return answer, choices


def plain_logprobs(logprobs: object, token_ids: object) -> Body | None:
    """By token id, whatever text stands for the tokens; None unless each token has one."""
    if not isinstance(logprobs, dict) or not isinstance(token_ids, list):
        return None
    values: Sequence[Any] | None = logprobs.get("token_logprobs")  # of a completion
    if isinstance(logprobs.get("content"), list):
        values = [each.get("logprob") for each in logprobs["content"] if isinstance(each, dict)]
    if not isinstance(values, list) or len(values) != len(token_ids):
        return None
    return {
        "content": [
            {"token_id": token, "logprob": value, "rank": None}
            for token, value in zip(token_ids, values, strict=True)
        ]
    }
