"""Writes a tiny random Qwen3-MoE checkpoint, bit for bit the same for a seed, without torch.

Four layers, the first dense, 16 experts of which 4 run, vocabulary 1024: small enough to start in
seconds, with everything that routing replay must get right. Another seed is another policy version.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": None,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "eos_token_id": None,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 1024,
}
SCALE: Final = 0.2  # wide enough that neighbouring tokens route differently


def write_model(folder: Path, *, seed: int) -> None:
    """``config.json`` and ``model.safetensors`` in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    random = np.random.default_rng(seed)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    offset = 0
    for name, shape in _shapes():
        data = _bfloat16(name, shape, random).tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [offset, offset + len(data)],
        }
        parts.append(data)
        offset += len(data)
    head = json.dumps(header).encode()
    head = head.ljust(-(-len(head) // 8) * 8)  # the data begins at a multiple of 8 bytes
    content = struct.pack("<Q", len(head)) + head + b"".join(parts)
    (folder / "model.safetensors").write_bytes(content)


def _bfloat16(name: str, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.uint16]:
    """Norms are one, all else is normal; the upper half of a float32 is a bfloat16."""
    if name.endswith("norm.weight"):
        values = np.ones(shape, np.float32)
    else:
        values = (random.standard_normal(shape) * SCALE).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2")


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocabulary = CONFIG["hidden_size"], CONFIG["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(CONFIG["num_hidden_layers"]):
        yield from _layer_shapes(f"model.layers.{layer}", layer in CONFIG["mlp_only_layers"])
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def _layer_shapes(layer: str, is_dense: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head_dim = CONFIG["hidden_size"], CONFIG["head_dim"]
    queries = CONFIG["num_attention_heads"] * head_dim
    keys = CONFIG["num_key_value_heads"] * head_dim
    yield f"{layer}.input_layernorm.weight", (hidden,)
    yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
    yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
    yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
    yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
    yield f"{layer}.self_attn.q_norm.weight", (head_dim,)
    yield f"{layer}.self_attn.k_norm.weight", (head_dim,)
    if is_dense:
        yield from _mlp_shapes(f"{layer}.mlp", CONFIG["intermediate_size"])
        return
    yield f"{layer}.mlp.gate.weight", (CONFIG["num_experts"], hidden)
    for expert in range(CONFIG["num_experts"]):
        yield from _mlp_shapes(f"{layer}.mlp.experts.{expert}", CONFIG["moe_intermediate_size"])


def _mlp_shapes(mlp: str, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = CONFIG["hidden_size"]
    yield f"{mlp}.gate_proj.weight", (inner, hidden)
    yield f"{mlp}.up_proj.weight", (inner, hidden)
    yield f"{mlp}.down_proj.weight", (hidden, inner)
