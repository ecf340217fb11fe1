"""Recorded answers of a real engine: JSON lines of ``{"request": …, "response": …}``.

Both are vLLM's own bodies of ``POST /inference/v1/generate``, asked with ``logprobs``, answered
inline with every layer's rows. Each answer becomes a rollout of one turn.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from examples.train_tiny_moe.rollouts import Rollout, Turn


class UnusableAnswer(Exception):
    """An answer that says too little to be compared."""


def read_answers(path: Path) -> list[Rollout]:
    """All answers of a file, in order. Raises UnusableAnswer, which names the line."""
    lines = path.read_text().splitlines()
    return [_rollout(number, json.loads(line)) for number, line in enumerate(lines, 1)]


def _rollout(number: int, line: dict[str, Any]) -> Rollout:
    request, choice = line["request"], line["response"]["choices"][0]
    if not choice.get("logprobs"):
        raise UnusableAnswer(f"line {number}: asked without logprobs")
    sampling = request["sampling_params"]
    rows = choice.get("routed_experts")
    turn = Turn(
        request_id=f"answer{number}",
        prompt_ids=request["token_ids"],
        completion_ids=choice["token_ids"],
        logprobs_C=[entry["logprob"] for entry in choice["logprobs"]["content"]],
        sampled_C=[True] * len(choice["token_ids"]),
        temperature=sampling.get("temperature", 1.0),
        top_k=max(0, sampling.get("top_k", 0)),
        top_p=sampling.get("top_p", 1.0),
        experts_NAK=None
        if rows is None
        else np.load(io.BytesIO(base64.b64decode(rows)), allow_pickle=False),
        kept_C=choice.get("sampling_mask"),
        scores_C=choice.get("sampling_mask_logprobs"),
    )
    return Rollout(
        rollout_id=f"answer{number}", group_id=f"answer{number}", reward=0.0, turns=(turn,)
    )
