"""Requests and answers of the token-in/token-out route, small and of 30 k tokens."""

from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import orjson

from bench.workload import QWEN3_30B, VOCAB_SIZE

LARGE_BODY_BYTES: Final = 16_384  # what is larger is answered with the large answer
RUN_ID: Final = "bench"
FILE_MARK: Final = "@file@"  # the engine puts its file's name here


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Prompt and completion tokens of every request of a run."""

    name: str
    prompt_tokens: int
    completion_tokens: int

    def request_body(self) -> bytes:
        """What a client sends."""
        rng = np.random.default_rng(1)
        return orjson.dumps(
            {
                "token_ids": rng.integers(0, VOCAB_SIZE, self.prompt_tokens).tolist(),
                "sampling_params": {
                    "max_tokens": self.completion_tokens,
                    "temperature": 1.0,
                    "top_p": 0.95,
                    "top_k": 50,
                    "logprobs": 0,
                },
            }
        )

    def answer_body(self) -> bytes:
        """What an engine with the plugin answers: tokens, log probabilities, segments."""
        rng = np.random.default_rng(2)
        tokens = rng.integers(0, VOCAB_SIZE, self.completion_tokens).tolist()
        content = [
            {"token": f"token_id:{token}", "logprob": -0.125 * (token % 31), "top_logprobs": []}
            for token in tokens
        ]
        choice = {
            "index": 0,
            "token_ids": tokens,
            "logprobs": {"content": content},
            "finish_reason": "length",
            "routed_experts": None,
        }
        return orjson.dumps(
            {
                "request_id": "generate-tokens-bench",
                "choices": [choice],
                "payload_segments": {"0": self._segments()},
                "payload_model": msgspec.to_builtins(QWEN3_30B),
            }
        )

    def _segments(self) -> list[dict[str, Any]]:
        tokens = self.prompt_tokens + self.completion_tokens
        routing = {"field": "routed_experts", "pos": 0, "rows": tokens - 1, "offset": 4096}
        routing |= {"dtype": "uint8", "shape": list(QWEN3_30B.row_shape)}
        masks = {"field": "sampling_mask", "pos": self.prompt_tokens, "offset": 1 << 24}
        masks |= {"rows": self.completion_tokens, "dtype": "int32", "shape": [VOCAB_SIZE]}
        return [{"file": FILE_MARK, "row": 0, **segment} for segment in (routing, masks)]


SMALL: Final = Traffic(name="small bodies", prompt_tokens=64, completion_tokens=16)
LARGE: Final = Traffic(name="30 k-token bodies", prompt_tokens=28_000, completion_tokens=2_000)
