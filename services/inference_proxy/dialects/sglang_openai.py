"""SGLang's OpenAI routes, as version 0.5.23 reads and writes them: pure.

A chat's choices carry ``meta_info`` on request, the same as on ``/generate``. A completion's rows
stand once per answer in ``sglext``, so only a request of one choice has them; it has no kept sets.
"""

from services.inference_proxy.dialects.base import Ask, Body, UntranslatableParameter
from services.inference_proxy.dialects.openai_forms import (
    is_chat,
    parts_of,
    plain_logprobs,
    wants_logprobs,
    without,
)
from services.inference_proxy.dialects.sglang_reading import cuts, read_choice
from sideband.engines.sglang import decode_sglang_rows
from sideband.model import ModelShape


def train(body: Body, path: str, ask: Ask) -> Body:
    """Raises UntranslatableParameter for several choices of a completion."""
    asked = {**without(body, "stream_options", "request_id"), "stream": False}
    asked |= {"rid": ask.request_id, "return_token_ids": True, "return_routed_experts": True}
    if is_chat(path):
        asked |= {"logprobs": True, "return_meta_info": True, "return_sampling_mask": cuts(body)}
    else:
        if (body.get("n") or 1) > 1:
            raise UntranslatableParameter("n", "must be 1: SGLang gives one choice's rows")
        asked["logprobs"] = 1 if body.get("logprobs") is None else body["logprobs"]
    return asked


def read(answer: object, path: str, model: ModelShape) -> Body:
    """In the form of the generate route. Raises UnreadableAnswer, InvalidInput."""
    body, raw_choices = parts_of(answer)
    prompt, choices = None, []
    extension = body.get("sglext")
    rows = extension.get("routed_experts") if isinstance(extension, dict) else None
    for raw in raw_choices:
        prompt = raw.get("prompt_token_ids") if prompt is None else prompt
        token_ids = raw.get("response_token_ids" if is_chat(path) else "token_ids")
        index, meta = raw.get("index"), raw.get("meta_info")
        if isinstance(meta, dict) and isinstance(token_ids, list) and type(index) is int:
            choice = read_choice(index, token_ids, meta, model)
        else:
            choice = {
                "index": index,
                "token_ids": token_ids,
                "routed_experts": decode_sglang_rows(rows, model),
                "sampling_mask": None,
            }
        if choice.get("logprobs") is None:
            choice["logprobs"] = plain_logprobs(raw.get("logprobs"), token_ids)
        choices.append({**choice, "finish_reason": raw.get("finish_reason")})
    return {"usage": body.get("usage"), "prompt_token_ids": prompt, "choices": choices}


def shown(answer: Body, asked: Body) -> Body:
    """Without token ids, rows and log probabilities that only the proxy wanted."""
    hidden = [] if asked.get("return_meta_info") else ["meta_info"]
    if not asked.get("return_token_ids"):
        hidden += ["token_ids", "response_token_ids", "prompt_token_ids"]
    choices = [without(choice, *hidden) for choice in answer["choices"]]
    if not wants_logprobs(asked):
        choices = [{**choice, "logprobs": None} for choice in choices]
    kept = answer if asked.get("return_routed_experts") else without(answer, "sglext")
    return {**kept, "choices": choices}
