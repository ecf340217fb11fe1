"""Every config in tests/data/model_configs, and the numbers that SPEC binds."""

import json
from pathlib import Path
from typing import Any

import pytest

from sideband.model import ModelShape
from sideband.routing import model_shape, routed_layers
from sideband.routing.families import FAMILIES, Family

CONFIGS = Path(__file__).parents[2] / "data" / "model_configs"


def read(name: str) -> dict[str, Any]:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    assert isinstance(config, dict)
    return config


# name -> (decoder layers, layers without a learned router, top-k, id space, vocabulary)
ULTRA_ROUTED = """
    1 3 5 8 10 12 15 17 19 21 24 26 28 30 33 35 37 40 42 44 46 49 51 53 55 58 60 62 65 67 69 71 74
    76 78 80 83 85 87 90 92 94 96 99 101 103 105 107
"""
NANO_ROUTED = "1 3 6 8 10 13 15 17 20 22 24 27 29 31 34 36 38 40 43 45 47 49 51"


def without(count: int, routed: str) -> set[int]:
    return set(range(count)) - set(map(int, routed.split()))


ANSWERS: dict[str, tuple[int, set[int], int, int, int]] = {
    "DeepSeek-V3": (61, {0, 1, 2}, 8, 256, 129280),
    "DeepSeek-V4-Flash": (43, {0, 1, 2}, 6, 256, 129280),
    "GLM-5": (78, {0, 1, 2}, 8, 256, 154880),
    "Kimi-K2-Instruct": (61, {0}, 8, 384, 163840),
    "Kimi-K3": (93, {0}, 16, 896, 163840),
    "Llama-4-Scout-17B-16E-Instruct": (48, set(), 1, 16, 202048),
    "MiMo-V2-Flash": (48, {0}, 8, 256, 152576),
    "MiniMax-M2.5": (62, set(), 8, 256, 200064),
    "MiniMax-M3": (60, {0, 1, 2}, 4, 128, 200064),
    "Mixtral-8x7B-v0.1": (32, set(), 2, 8, 32000),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (52, without(52, NANO_ROUTED), 6, 128, 131072),
    "NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": (108, without(108, ULTRA_ROUTED), 22, 512, 131072),
    "Qwen3-30B-A3B": (48, set(), 8, 128, 151936),
    "Qwen3-Next-80B-A3B": (48, set(), 10, 512, 151936),
    "Qwen3-VL-30B-A3B-Instruct": (48, set(), 8, 128, 151936),
    "Qwen3.5-35B-A3B": (40, set(), 8, 256, 248320),
    "Step-3.7-Flash": (45, {0, 1, 2}, 8, 288, 128896),
    "default-afmoe": (32, {0}, 6, 64, 200192),
    "default-axk1": (61, {0}, 8, 192, 163840),
    "default-deepseek_v2": (27, {0}, 6, 64, 102400),
    "default-dots1": (62, {0}, 6, 128, 152064),
    "default-ernie4_5_moe": (28, {0}, 6, 64, 103424),
    "default-exaone_moe": (32, {0}, 8, 64, 102400),
    "default-glm4_moe": (46, {0}, 8, 128, 151552),
    "default-granitemoe": (32, set(), 2, 8, 32000),
    "default-hy_v3": (80, {0}, 8, 192, 120832),
    "default-jamba": (32, set(range(0, 32, 2)), 2, 16, 65536),
    "default-laguna": (40, {0}, 8, 256, 100352),
    "default-longcat_flash": (28, set(), 12, 768, 131072),
    "default-olmoe": (16, set(), 8, 64, 50304),
    "default-phimoe": (32, set(), 2, 16, 32064),
    "default-qwen2_moe": (24, set(), 4, 60, 151936),
    "gemma-4-26B-A4B": (30, set(), 8, 128, 262144),
    "gpt-oss-20b": (24, set(), 4, 32, 201088),
}


def test_every_config_has_an_answer_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(ANSWERS)


@pytest.mark.parametrize("name", ANSWERS)
def test_the_fingerprint_of_a_model(name: str) -> None:
    num_layers, without_router, top_k, id_space, vocab_size = ANSWERS[name]
    expected = ModelShape(
        num_layers=num_layers,
        layer_ids=tuple(layer for layer in range(num_layers) if layer not in without_router),
        top_k=top_k,
        id_space=id_space,
        vocab_size=vocab_size,
    )
    config = read(name)
    assert model_shape(config) == expected
    assert routed_layers(config) == expected.layer_ids


# SPEC section 6: bytes per token, and the saving against rows of all layers
@pytest.mark.parametrize(
    ("name", "size_bytes", "saved_percent"),
    [
        ("Qwen3-30B-A3B", 384, 0.0),
        ("default-glm4_moe", 360, 2.2),  # GLM-4.5-Air
        ("GLM-5", 600, 3.8),  # GLM-5.3 has its shape
        ("DeepSeek-V4-Flash", 240, 7.0),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 138, 55.8),
    ],
)
def test_known_bytes_per_token(name: str, size_bytes: int, saved_percent: float) -> None:
    shape = model_shape(read(name))
    assert shape.row_size_bytes == size_bytes
    assert round(100 * (1 - len(shape.layer_ids) / shape.num_layers), 1) == saved_percent


def test_a_generation_setting_is_not_the_routers_top_k() -> None:
    text = read("Kimi-K3")["text_config"]
    assert (text["top_k"], text["num_experts_per_token"]) == (50, 16)
    assert model_shape(read("Kimi-K3")).top_k == 16


def test_depth_comes_from_the_block_list_where_nothing_else_gives_it() -> None:
    config = read("NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16")
    assert "num_hidden_layers" not in config
    assert model_shape(config).num_layers == len(config["layers_block_type"]) == 108


def test_zero_compute_experts_widen_the_id_space() -> None:
    shape = model_shape(read("default-longcat_flash"))
    assert (shape.id_space, shape.row_dtype.name) == (512 + 256, "uint16")


def test_a_callers_vocabulary_wins() -> None:
    assert model_shape(read("Qwen3-30B-A3B"), vocab_size=1000).vocab_size == 1000


@pytest.mark.parametrize("name", ANSWERS)
def test_mtp_layers_never_become_decoder_layers(name: str) -> None:
    config = read(name)
    inner = config.get("text_config", config)
    inner |= {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]}
    assert model_shape(config).num_layers == ANSWERS[name][0]


def has_defaults(family: Family) -> bool:
    needed = (family.layers, family.experts, family.top_k, *family.schedule.values())
    return None not in needed and family.experts != 1 and family.switch_key is None


@pytest.mark.parametrize("name", [name for name in FAMILIES if has_defaults(FAMILIES[name])])
def test_a_family_with_defaults_needs_no_key_but_its_name(name: str) -> None:
    shape = model_shape({"model_type": name})
    assert (shape.num_layers, shape.top_k) == (FAMILIES[name].layers, FAMILIES[name].top_k)
    assert model_shape({"text_config": {"model_type": f"{name}_text"}}) == shape
