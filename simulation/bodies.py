"""A finished rollout as the orchestrator takes it: JSON, or the binary form. Pure.

The environment is a client like any other: it knows the documented fields, not the service's code.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import orjson

from simulation.plan import RolloutPlan

Json = dict[str, Any]
BINARY: Final = "application/vnd.sideband.rollout+msgpack"
_ARRAYS: Final = {
    "prompt_token_ids": "<i4",
    "completion_token_ids": "<i4",
    "weight_versions": "<i4",
    "logprobs": "<f4",
}


def turn_body(request_id: str, prompt_ids: Sequence[int], plan: RolloutPlan, answer: Json) -> Json:
    """One turn out of the proxy's answer."""
    choice = answer["choices"][0]
    body = {
        "request_id": request_id,
        "prompt_token_ids": list(prompt_ids),
        "completion_token_ids": choice["token_ids"],
        "logprobs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
        "temperature": plan.temperature,
        "top_k": plan.top_k,
        "weight_versions": _versions(choice),
    }
    segments = answer.get("payload_segments")
    if segments is not None:
        return body | {
            "payload_segments": segments.get("0", []),
            "payload_model": answer.get("payload_model"),
        }
    body |= {
        name: choice.get(name)
        for name in ("sampling_mask", "sampling_mask_logprobs")
        if choice.get(name) is not None
    }
    if choice.get("routed_experts") is not None:
        body |= {
            "routed_experts": choice["routed_experts"],
            "routed_layer_ids": answer.get("routed_layer_ids"),
            "routed_experts_prompt_start": (answer.get("routed_experts_start") or {}).get("0", 0),
        }
    return body


def _versions(choice: Json) -> list[int] | None:
    spans = choice.get("weight_versions")
    if not spans:
        return None
    return [int(span["version"]) for span in spans for _ in range(span["end"] - span["start"])]


def rollout_body(plan: RolloutPlan, turns: Sequence[Json]) -> Json:
    """The whole rollout; a failed one brings no reward."""
    is_completed = plan.ending == "completed"
    return {
        "rollout_id": plan.rollout_id,
        "status": plan.ending,
        "reward": plan.reward if is_completed else None,
        "turns": list(turns),
    }


def encode(body: Json, *, is_binary: bool) -> tuple[bytes, str]:
    """Body and content type of a delivery."""
    if not is_binary:
        return orjson.dumps(body), "application/json"
    turns = [
        {
            name: np.array(value, _ARRAYS[name]).tobytes()
            if name in _ARRAYS and value is not None
            else value
            for name, value in turn.items()
        }
        for turn in body["turns"]
    ]
    return msgspec.msgpack.encode({**body, "turns": turns}), BINARY


def files_of(body: Json) -> list[str]:
    """The payload files that a rollout names."""
    return sorted(
        {
            segment["file"]
            for turn in body["turns"]
            for segment in turn.get("payload_segments") or ()
        }
    )
