"""What the stub engine runs: what it says is a function of the tokens, so legs must agree.

Decoder layers 0..2, of which 1 and 2 route (two of eight experts); 64 token ids. Layer 0 is dense:
inline it is a column of zeros, as vLLM leaves it.
"""

import string
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sideband.model import ModelShape

MODEL = ModelShape(num_layers=3, layer_ids=(1, 2), top_k=2, id_space=8, vocab_size=64)
HF_CONFIG = {  # the same model as its config.json says it
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
    "vocab_size": 64,
}
ALPHABET = string.ascii_letters + string.digits + "+/"  # of the 64 tokens
COMPLETION_MAX = 8192  # a fuzzed request may ask for any number, and a thread cannot be ended
GARBAGE = 7  # added to the ids of rows that a decode engine made up


def next_token(tokens: list[int]) -> int:
    """What is sampled after ``tokens``."""
    return (sum(tokens) * 7 + len(tokens)) % MODEL.vocab_size


def sampled(prompt: list[int], count: int) -> list[int]:
    """``count`` tokens after a prompt."""
    found: list[int] = []
    total, length = sum(prompt), len(prompt)
    for _ in range(min(count, COMPLETION_MAX)):
        token = (total * 7 + length) % MODEL.vocab_size  # as next_token, without the sum anew
        found.append(token)
        total, length = total + token, length + 1
    return found


def true_rows(tokens: list[int]) -> NDArray[np.uint8]:
    """Rows [N, 2, 2] of N forwarded tokens: what every leg must agree on."""
    sums_N = np.cumsum(np.asarray(tokens, np.int64) * 5 + 1)
    first_NL = np.stack([sums_N, sums_N // 3], axis=1) % MODEL.id_space
    second_NL = (first_NL + 1 + (sums_N % 6)[:, None]) % MODEL.id_space
    return np.stack([first_NL, second_NL], axis=2).astype(np.uint8)


def all_layers(rows_NLK: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same rows as vLLM sends them: the dense layer is zeros."""
    return np.concatenate([np.zeros_like(rows_NLK[:, :1]), rows_NLK], axis=1)


def kept_ids(token: int) -> list[int]:
    """The kept set of a sampled token."""
    return sorted({token, (token + 5) % MODEL.vocab_size})


def logprob_of(token: int) -> float:
    """Of a sampled token."""
    return -0.25 * (token % 8)


def scores_of(ids: list[int]) -> list[float]:
    """Logprobs of a kept set: multiples of 1/64, a function of the id."""
    return [-(token_id + 1) / 64 for token_id in ids]


def rendered(body: dict[str, Any]) -> list[int]:
    """The prompt of an OpenAI request: one character a token, 1 and 3 begin and 2 ends a part."""
    if "messages" not in body:
        prompt = body["prompt"]
        return [ALPHABET.index(c) for c in prompt] if isinstance(prompt, str) else list(prompt)
    tokens: list[int] = []
    for message in body["messages"]:
        begin = 3 if message["role"] == "assistant" else 1
        tokens += [begin, *(ALPHABET.index(c) for c in message["content"]), 2]
    return [*tokens, 3]
