"""What the model types mean when a config leaves a key out: the class defaults, as facts.

A family is what shares one set of defaults. ``None`` marks a value without a default that can be
relied on: a config must then carry the key. Names end without ``_text``: a wrapper's inner type
means the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class Family:
    """Defaults of one model type: decoder layers, routed experts, top-k, vocabulary, schedule.

    ``schedule`` holds the defaults of the keys that make layers dense (see
    ``sideband.routing.schedule``); keys that are not in it are neutral when absent.
    """

    layers: int | None
    experts: int | None
    top_k: int | None
    vocab_size: int | None
    schedule: Mapping[str, int | tuple[int, ...] | None] = field(default_factory=dict)
    layers_key: str = "num_hidden_layers"
    zero_experts: int = 0  # identity experts with ids after the routed ones
    switch_key: str | None = None  # a boolean that must be true for experts to exist at all
    lists_hold_mtp: bool = False  # per-layer lists go on over the MTP layers
    has_block_types: bool = False  # one block per layer: attention, Mamba, MLP or MoE


def _first(count: int | None) -> dict[str, int | tuple[int, ...] | None]:
    return {"first_k_dense_replace": count}


FAMILIES: Final[Mapping[str, Family]] = {
    "afmoe": Family(32, 64, 6, 200192, {"num_dense_layers": 1}),
    "aria": Family(32, 8, 2, 32000),
    "axk1": Family(61, 192, 8, 163840, _first(1)),
    "axk2": Family(48, 128, 8, 163840, _first(1)),
    "bailing_hybrid": Family(42, 512, 8, 157184, _first(2)),
    "bailing_moe": Family(None, None, None, None, _first(None)),
    "beam": Family(52, 256, 8, 151936, _first(3)),
    "cohere2_moe": Family(40, 8, 2, 256000, _first(0)),
    "deepseek_v2": Family(32, 64, None, 102400, _first(0)),
    "deepseek_v3": Family(61, 256, 8, 129280, _first(3)),
    "deepseek_v32": Family(61, 256, 8, 129280, _first(3)),
    # the first layers pick experts by token id: they own experts and route nothing
    "deepseek_v4": Family(43, 256, 6, 129280, {"num_hash_layers": 3}),
    "dots1": Family(62, None, None, 152064, _first(0)),
    "dots3_note": Family(46, 256, 8, 152064, _first(1)),
    "ernie4_5_moe": Family(
        28,
        64,
        6,
        103424,
        {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
    ),
    "exaone_moe": Family(32, 64, 8, 102400, _first(1)),
    "flex_olmo": Family(32, 7, 5, 100352),
    "flint": Family(49, 256, 6, 150144, {"mlp_only_layers": (0, 1)}),
    "gemma4": Family(30, None, None, 262144, switch_key="enable_moe_block"),
    "glm4_moe": Family(46, 128, 8, 151552, _first(1)),
    "glm4_moe_lite": Family(47, 64, 4, 154880, _first(1)),
    "glm4v_moe": Family(46, 128, 8, 151424, _first(1)),
    "glm5_next": Family(45, 288, 8, 154880, _first(3)),
    "glm_moe_dsa": Family(78, 256, 8, 154880, _first(3)),
    "gpt_oss": Family(36, 128, 4, 201088),
    "granitemoe": Family(32, 8, 2, 32000),
    "granitemoe_swa": Family(32, 8, 2, 32000),
    "granitemoehybrid": Family(32, 8, 2, 32000),
    "granitemoeshared": Family(32, 8, 2, 32000),
    "hunyuan_v1_moe": Family(32, 1, 1, 290943),
    "hy_v3": Family(80, 192, 8, 120832, _first(1)),
    "hy_v4": Family(34, 256, 8, 120832, _first(1)),
    "hy_v4_vl": Family(78, 256, 8, 120832, _first(1)),
    "inkling": Family(66, 256, 6, 201024, {"dense_mlp_idx": 0}),
    "inkling2": Family(48, 384, 8, 201024),
    "jamba": Family(32, 16, 2, 65536, {"expert_layer_period": 2, "expert_layer_offset": 1}),
    "kimi_linear": Family(27, 256, 8, 163840, _first(1)),
    "kolibri1": Family(50, 384, 6, 128000),
    "laguna": Family(40, 256, 8, 100352, _first(1)),
    "lara_mini": Family(34, 128, 4, 151936),
    "lfm2_moe": Family(32, 32, 4, 65536, {"num_dense_layers": 2}),
    "llama4": Family(48, 16, 1, 202048, {"interleave_moe_layer_step": 1}),
    # a layer holds two attentions and two MLPs around ONE router: num_layers counts routers
    "longcat_flash": Family(28, 512, 12, 131072, layers_key="num_layers", zero_experts=256),
    "mellum": Family(28, 64, 8, 98304),
    "mimo_v2_flash": Family(48, 256, 8, 152576, _first(1)),
    "minimax": Family(32, 8, 2, 32000),
    "minimax_m2": Family(62, 256, 8, 200064),
    "minimax_m3": Family(60, 128, 4, 200064),
    "mistral4": Family(36, 128, 4, 131072, _first(0)),
    "mistral_large4": Family(72, 128, 4, 204800, _first(1)),
    "mixtral": Family(32, 8, 2, 32000),
    "muse_spark": Family(62, 256, 8, 202048),
    "nemotron_h": Family(None, 8, 2, 131072, has_block_types=True),
    "olmoe": Family(16, 64, 8, 50304),
    "phimoe": Family(32, 16, 2, 32064),
    "qwen2_moe": Family(24, 60, 4, 151936, {"decoder_sparse_step": 1}),
    "qwen3_5_moe": Family(40, 256, 8, 248320),
    "qwen3_moe": Family(24, 128, 8, 151936, {"decoder_sparse_step": 1}),
    "qwen3_next": Family(48, 512, 10, 151936, {"decoder_sparse_step": 1}),
    "qwen3_omni_moe": Family(28, 128, 8, 3584, {"decoder_sparse_step": 1}),
    "qwen3_vl_moe": Family(24, 60, 4, 151936, {"decoder_sparse_step": 1}),
    "qwen4_exp": Family(40, 512, 10, 248320),
    "sarvam_mla": Family(32, 128, 8, 262144, _first(1)),
    "sarvam_moe": Family(19, 128, 6, 262144, _first(1)),
    "solar_open": Family(48, 128, 8, 196608, _first(0)),
    "step3": Family(61, 48, 3, 128815, _first(None)),
    "step3p5": Family(45, 288, 8, 128815, _first(3), lists_hold_mtp=True),
}

# Other names of the same defaults: checkpoints whose config class is another family's.
_ALIASES: Final = {
    "bailing_moe_linear": "bailing_moe",
    "bailing_moe_v2": "bailing_moe",
    "bailing_moe_v2_5": "bailing_moe",
    "hunyuan": "hunyuan_v1_moe",
    "kimi_k2": "deepseek_v3",
    "longcat_flash_ngram": "longcat_flash",
    "mimo_v2": "mimo_v2_flash",
    "minimax_m1": "minimax",
    "minimax_m3_vl": "minimax_m3",
    "minimax_text_01": "minimax",
    "step3p7": "step3p5",
}

# The second name of a family: what engines dispatch on when a checkpoint has its own model type.
_ARCHITECTURES: Final = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "GptOssForCausalLM": "gpt_oss",
    "KimiLinearForCausalLM": "kimi_linear",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MixtralForCausalLM": "mixtral",
    "NemotronHForCausalLM": "nemotron_h",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
}


def family_of(model_type: str, architectures: tuple[str, ...]) -> Family | None:
    """The family of a model type, else of the first known architecture, else None."""
    name = model_type.lower().removesuffix("_text").removesuffix("_thinker")
    name = _ALIASES.get(name, name)
    if name in FAMILIES:
        return FAMILIES[name]
    known = (_ARCHITECTURES[each] for each in architectures if each in _ARCHITECTURES)
    found = next(known, None)
    return FAMILIES[found] if found is not None else None
