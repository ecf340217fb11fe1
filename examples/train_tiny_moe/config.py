"""What the model needs to know of a Hugging Face ``config.json`` of the Qwen3-MoE family."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sideband import ModelShape, model_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyMoeConfig:
    """Sizes of the model. ``shape`` is the fingerprint that travels from engine to trainer."""

    shape: ModelShape
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    norm_topk_prob: bool

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> Self:
        """From the parsed JSON. Raises KeyError for a key that is missing."""
        rope = hf_config.get("rope_parameters") or {}
        return cls(
            shape=model_shape(hf_config),
            hidden_size=hf_config["hidden_size"],
            intermediate_size=hf_config["intermediate_size"],
            moe_intermediate_size=hf_config["moe_intermediate_size"],
            num_layers=hf_config["num_hidden_layers"],
            num_heads=hf_config["num_attention_heads"],
            num_kv_heads=hf_config["num_key_value_heads"],
            head_dim=hf_config["head_dim"],
            rms_norm_eps=hf_config["rms_norm_eps"],
            rope_theta=rope.get("rope_theta") or hf_config["rope_theta"],
            norm_topk_prob=hf_config["norm_topk_prob"],
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """From a ``config.json``."""
        return cls.of(json.loads(path.read_text()))
