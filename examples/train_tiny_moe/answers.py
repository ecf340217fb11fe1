"""Recorded answers of a real engine: JSON lines of ``{"request": …, "response": …}``.

Both are vLLM's own bodies of ``POST /inference/v1/generate``, asked with ``logprobs``, answered
inline with every layer's rows, or by handle. Each answer becomes a rollout of one turn.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from examples.train_tiny_moe.handles import AnsweredRows, read_rows
from examples.train_tiny_moe.rollouts import Rollout, Turn
from sideband import PayloadRoot


class UnusableAnswer(Exception):
    """An answer that says too little to be compared."""


def read_answers(path: Path, payload_root: Path | None = None) -> list[Rollout]:
    """All answers of a file, in order; ``payload_root`` holds the rows of those by handle. Blocks.

    Raises UnusableAnswer, which names the line, and what ``read_rows`` raises.
    """
    root = None if payload_root is None else PayloadRoot.open(payload_root)
    lines = path.read_text().splitlines()
    return [_rollout(number, json.loads(line), root) for number, line in enumerate(lines, 1)]


def _rollout(number: int, line: dict[str, Any], root: PayloadRoot | None) -> Rollout:
    request, choice = line["request"], line["response"]["choices"][0]
    if not choice.get("logprobs"):
        raise UnusableAnswer(f"line {number}: asked without logprobs")
    sampling = request["sampling_params"]
    rows = _inline(choice)
    if line["response"].get("payload_segments"):
        if root is None:
            raise UnusableAnswer(f"line {number}: by handle, and no payload root was given")
        token_ids = [*request["token_ids"], *choice["token_ids"]]
        rows = read_rows(line["response"], token_ids, len(request["token_ids"]), root)
    turn = Turn(
        request_id=f"answer{number}",
        prompt_ids=request["token_ids"],
        completion_ids=choice["token_ids"],
        logprobs_C=[entry["logprob"] for entry in choice["logprobs"]["content"]],
        sampled_C=[True] * len(choice["token_ids"]),
        temperature=sampling.get("temperature", 1.0),
        top_k=max(0, sampling.get("top_k", 0)),
        top_p=sampling.get("top_p", 1.0),
        experts_NAK=rows.experts_NAK,
        kept_C=rows.kept_C,
        scores_C=rows.scores_C,
    )
    return Rollout(
        rollout_id=f"answer{number}", group_id=f"answer{number}", reward=0.0, turns=(turn,)
    )


def _inline(choice: dict[str, Any]) -> AnsweredRows:
    text = choice.get("routed_experts")
    rows = None if text is None else np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return AnsweredRows(
        experts_NAK=rows,
        kept_C=choice.get("sampling_mask"),
        scores_C=choice.get("sampling_mask_logprobs"),
    )
