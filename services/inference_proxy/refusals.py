"""Client bodies that are refused before an engine sees them: pure.

The shape of a body is checked by its schema; here are the rules between its parts. A client never
names a folder to write to, nor a host to fetch a KV cache from.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

Kind = Literal["train", "eval", "frozen"]

_PAYLOAD_KEYS: Final = ("payload_dir", "payload_run_id")
_TRANSFER_KEYS: Final = ("kv_transfer_params", "ec_transfer_params")
# Of an OpenAI request, which reaches the engine unchecked: what a trainer must know of sampling.
_SAMPLING: Final[Mapping[str, tuple[type, ...]]] = {
    "max_completion_tokens": (int,),
    "max_tokens": (int,),
    "n": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
}
_NESTED: Final = ("sampling_params", "extra_args", "vllm_xargs")


class Refused(Exception):
    """A body that breaks a rule; ``code`` is stable, ``field`` says where."""

    def __init__(self, code: str, field: str, rule: str) -> None:
        self.code, self.field, self.rule = code, field, rule
        super().__init__(f"{field}: {rule}")


def check_places(body: Mapping[str, Any]) -> None:
    """No folder and no transfer address from a client, in any place an engine would look.

    Raises Refused.
    """
    _check_parts(_parts(body))


def _check_parts(parts: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    for path, part in parts:
        for key in _PAYLOAD_KEYS:
            if key in part:
                rule = "is set by the proxy for train requests; leave it out"
                raise Refused("payload_dir_refused", f"{path}{key}", rule)
        for key in _TRANSFER_KEYS:
            if part.get(key) is not None:
                rule = "names where engines exchange caches; the proxy sets it"
                raise Refused("kv_transfer_refused", f"{path}{key}", rule)


def check_generate(
    body: Mapping[str, Any], *, prompt_tokens: int, kind: Kind, is_pair: bool
) -> None:
    """The rules of a token-in/token-out request. Raises Refused."""
    parts = _parts(body)
    _check_parts(parts)
    params = body["sampling_params"]
    choices = params.get("n")
    if is_pair and choices is not None and choices > 1:
        rule = "must be 1 through prefill/decode engines: each choice would need its own prefill"
        raise Refused("choices_refused", "sampling_params.n", rule)
    if kind == "train":
        for path, part in parts:
            if part.get("truncate_prompt_tokens") is not None:
                rule = "would shift every position of a train request; send the cut prompt"
                raise Refused("truncation_refused", f"{path}truncate_prompt_tokens", rule)
    start = params.get("routed_experts_prompt_start")
    if start is not None and start > prompt_tokens:
        rule = f"must not lie beyond the prompt of {prompt_tokens} tokens"
        raise Refused("prompt_start_refused", "sampling_params.routed_experts_prompt_start", rule)


def check_openai_train(body: Mapping[str, Any]) -> None:
    """The rules of an OpenAI request whose turn is kept: one prompt, from its first token on.

    Raises Refused.
    """
    for path, part in _parts(body):
        if part.get("truncate_prompt_tokens") is not None:
            rule = "would shift every position of a train request; send the cut prompt"
            raise Refused("truncation_refused", f"{path}truncate_prompt_tokens", rule)
    for name, kinds in _SAMPLING.items():
        value = body.get(name)
        if value is not None and type(value) not in kinds:
            raise Refused("parameter_refused", name, f"must be a number, not {value!r:.100}")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) != 1 and not all(type(t) is int for t in prompt):
        raise Refused("prompts_refused", "prompt", "must be one prompt in a train request")
    if body.get("echo"):
        raise Refused("echo_refused", "echo", "would mix the prompt into what was sampled")


def _parts(body: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The body and the nested objects that reach an engine's extra arguments, by path."""
    parts: list[tuple[str, Mapping[str, Any]]] = [("", body)]
    for path, part in parts:  # which grows
        for name in _NESTED:
            inner = part.get(name)
            if isinstance(inner, dict):
                parts.append((f"{path}{name}.", inner))
    return parts
