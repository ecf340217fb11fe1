"""Other models of the families: rules rather than the files at hand, and every refusal."""

import re
from typing import Any

import pytest

from sideband.errors import InvalidInput
from sideband.routing import (
    ContradictoryConfig,
    DenseModel,
    UnknownArchitecture,
    model_shape,
    routed_layers,
)
from tests.unit.routing.test_configs import read


def config(model_type: str, **keys: object) -> dict[str, object]:
    base = {"model_type": model_type, "num_hidden_layers": 8}
    return {**base, "num_experts": 16, "num_experts_per_tok": 2, **keys}


SPARSE_LAST = ["dense"] * 7 + ["sparse"]
ODD, EVEN = (1, 3, 5, 7), (0, 2, 4, 6)
CASES: list[tuple[dict[str, object], tuple[int, ...]]] = [
    # scalars of each family
    (config("qwen2_moe", decoder_sparse_step=2), ODD),
    (config("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3]), (1, 5, 7)),
    (config("qwen3_moe", mlp_only_layers=[0, 7]), (1, 2, 3, 4, 5, 6)),
    (config("qwen3_next", mlp_only_layers=None), tuple(range(8))),
    (config("deepseek_v2", first_k_dense_replace=1, moe_layer_freq=2), (2, 4, 6)),
    (config("deepseek_v3", moe_layer_freq=1), (3, 4, 5, 6, 7)),
    (config("deepseek_v4"), (3, 4, 5, 6, 7)),
    (config("deepseek_v4", num_hash_layers=5), (5, 6, 7)),
    (config("deepseek_v4", num_hash_layers=0), tuple(range(8))),
    (config("glm4_moe", first_k_dense_replace=3), (3, 4, 5, 6, 7)),
    (config("glm4_moe_lite"), tuple(range(1, 8))),
    (config("afmoe", num_dense_layers=2), tuple(range(2, 8))),
    (config("lfm2_moe"), tuple(range(2, 8))),
    (config("llama4_text", interleave_moe_layer_step=2), ODD),
    (config("llama4_text", moe_layers=[2, 5]), (2, 5)),
    (config("jamba", expert_layer_period=4, expert_layer_offset=2), (2, 6)),
    (config("ernie4_5_moe", moe_layer_start_index=2, moe_layer_end_index=5), (2, 3, 4, 5)),
    (config("ernie4_5_moe", moe_layer_interval=2), ODD),
    (config("ernie4_5_moe", moe_layer_end_index=-1), tuple(range(1, 8))),
    (config("hunyuan_v1_moe", moe_layer_num_skipped=1), tuple(range(1, 8))),
    (config("step3p5"), (3, 4, 5, 6, 7)),
    (config("step3p5", moe_layers_enum="4, 5,6"), (4, 5, 6)),
    (config("step3p5", moe_layers_enum=[4, 8], num_nextn_predict_layers=1), (4,)),
    (config("flint"), (2, 3, 4, 5, 6, 7)),
    (config("inkling", dense_mlp_idx=3), (3, 4, 5, 6, 7)),
    (config("kimi_k2", first_k_dense_replace=1), tuple(range(1, 8))),
    # a per-layer list beats a pattern beats a scalar
    (config("glm4_moe", mlp_layer_types=SPARSE_LAST, first_k_dense_replace=1), (7,)),
    (config("laguna", mlp_layer_types=SPARSE_LAST), (7,)),
    (config("deepseek_v4", mlp_layer_types=["hash_moe"] * 7 + ["moe"], num_hash_layers=3), (7,)),
    (config("minimax_m3", moe_layer_freq=[0, 1] * 4, first_k_dense_replace=3), ODD),
    (config("mimo_v2_flash", moe_layer_freq=[1, 0] * 4), EVEN),
    (config("exaone_moe", is_moe_layer=[False, True] * 4, first_k_dense_replace=5), ODD),
    (config("nemotron_h", layers_block_type=["mamba", "moe"] * 4), ODD),
    (config("nemotron_h", layer_types=["linear_attention", "moe"] * 4), ODD),
    (config("nemotron_h", hybrid_override_pattern="ME*E-EME"), ODD),
    (
        config(
            "nemotron_h", layers_block_type=["moe", "mlp"] * 4, hybrid_override_pattern="MEMEMEME"
        ),
        EVEN,
    ),
    (config("laguna", mlp_layer_types=SPARSE_LAST, moe_layer_freq=[0] * 7 + [1]), (7,)),
    # lists that go on over the MTP layers
    (
        config(
            "step3p7",
            mlp_layer_types=[*SPARSE_LAST, "sparse", "sparse"],
            num_nextn_predict_layers=2,
        ),
        (7,),
    ),
    # keys of other families that change nothing
    (config("mixtral", moe_every_n_layer=1, moe_layers_enum=None), tuple(range(8))),
    (config("qwen3_5_moe", mlp_only_layers=[]), tuple(range(8))),
]


@pytest.mark.parametrize(("keys", "expected"), CASES)
def test_routed_layers_of_a_family(keys: dict[str, object], expected: tuple[int, ...]) -> None:
    assert routed_layers(keys) == expected


# a missing key means the class default of that model type, never "all layers"
@pytest.mark.parametrize(
    ("name", "key", "dense"),
    [
        ("DeepSeek-V3", "first_k_dense_replace", {0, 1, 2}),
        ("GLM-5", "first_k_dense_replace", {0, 1, 2}),
        ("DeepSeek-V4-Flash", "num_hash_layers", {0, 1, 2}),
        ("MiMo-V2-Flash", "moe_layer_freq", {0}),
        ("Step-3.7-Flash", "first_k_dense_replace", {0, 1, 2}),
        ("default-glm4_moe", "first_k_dense_replace", {0}),
        ("default-afmoe", "num_dense_layers", {0}),
        ("default-axk1", "first_k_dense_replace", {0}),
        ("default-exaone_moe", "first_k_dense_replace", {0}),
        ("default-ernie4_5_moe", "moe_layer_start_index", {0}),
        ("default-ernie4_5_moe", "moe_layer_end_index", {0}),
        ("default-jamba", "expert_layer_period", set(range(0, 32, 2))),
        ("Qwen3-30B-A3B", "decoder_sparse_step", set()),
    ],
)
def test_a_missing_key_means_the_class_default(name: str, key: str, dense: set[int]) -> None:
    keys = read(name)
    del keys[key]
    shape = model_shape(keys)
    assert set(range(shape.num_layers)) - set(shape.layer_ids) == dense


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("default-olmoe", ("num_hidden_layers", "num_experts", "num_experts_per_tok")),
        ("default-laguna", ("num_hidden_layers", "num_experts", "num_experts_per_tok")),
        (
            "default-longcat_flash",
            ("num_layers", "moe_topk", "n_routed_experts", "zero_expert_num"),
        ),
        ("DeepSeek-V4-Flash", ("n_routed_experts", "vocab_size", "num_hidden_layers")),
        ("MiniMax-M2.5", ("num_local_experts", "num_experts_per_tok", "vocab_size")),
    ],
)
def test_numbers_have_class_defaults_too(name: str, missing: tuple[str, ...]) -> None:
    keys = read(name)
    for key in missing:
        del keys[key]
    assert model_shape(keys) == model_shape(read(name))


TEXT = config("qwen3_omni_moe_text", vocab_size=100)
WRAPPED: list[dict[str, object]] = [
    {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": TEXT}},
    {"model_type": "anything", "text_config": TEXT, "vision_config": config("siglip")},
    {"model_type": "internvl_chat", "llm_config": TEXT},
    {"model_type": "deepseek_vl_v2", "language_config": TEXT},
    {"model_type": "qwen3_omni_moe", "text_config": {**TEXT, "model_type": None}},
    {"text_config": {**TEXT, "model_type": None, "architectures": ["Qwen3MoeForCausalLM"]}},
    {"model_type": "my_own", "architectures": ["Mine", "Qwen3MoeForCausalLM"], **TEXT}
    | {"model_type": "my_own"},
]


@pytest.mark.parametrize("keys", WRAPPED)
def test_wrappers_nest_the_text_config(keys: dict[str, object]) -> None:
    shape = model_shape(keys)
    assert (shape.num_layers, shape.vocab_size, len(shape.layer_ids)) == (8, 100, 8)


def test_a_config_that_nests_without_end_is_refused() -> None:
    keys: dict[str, object] = TEXT
    for _ in range(5):
        keys = {"text_config": keys}
    with pytest.raises(UnknownArchitecture, match="model_type"):
        routed_layers(keys)


def test_a_vocabulary_may_be_named_by_the_wrapper_only() -> None:
    inner = config("qwen3_vl_moe_text")
    assert model_shape({"text_config": inner, "vocab_size": 77}).vocab_size == 77


@pytest.mark.parametrize(
    "keys",
    [
        {"num_experts": None, "n_routed_experts": 16},
        {"num_experts": None, "num_local_experts": 16, "moe_num_experts": 16},
        {"num_experts_per_tok": None, "moe_topk": [2] * 8},
        {"num_experts_per_tok": None, "moe_k": 2},
        {"num_experts_per_tok": 2, "experts_per_token": 2},
    ],
)
def test_other_names_of_a_number_are_read(keys: dict[str, object]) -> None:
    shape = model_shape(config("mixtral", **keys))
    assert (shape.id_space, shape.top_k) == (16, 2)


REFUSED: list[tuple[dict[str, Any], type[InvalidInput], str]] = [
    # unknown
    ({"num_hidden_layers": 4, "num_experts": 8}, UnknownArchitecture, "model_type is None"),
    (config("brand_new_moe"), UnknownArchitecture, "model_type is 'brand_new_moe'"),
    (config("llama", architectures=["LlamaForCausalLM"]), UnknownArchitecture, "LlamaForCausalLM"),
    ({"model_type": 7, "architectures": "X"}, UnknownArchitecture, "model_type is None"),
    (config("dots1", num_experts_per_tok=None), UnknownArchitecture, "num_experts_per_tok or"),
    ({"model_type": "bailing_moe"}, UnknownArchitecture, "num_experts or n_routed_experts"),
    (config("bailing_moe"), UnknownArchitecture, "first_k_dense_replace is None"),
    (config("nemotron_h"), UnknownArchitecture, "layers_block_type or hybrid_override_pattern"),
    (config("mixtral", moe_layer_interval=1, moe_every_n_layer=2), UnknownArchitecture, "n_layer"),
    (config("mixtral", num_first_k_dense_layers=1), UnknownArchitecture, "no rule reads it"),
    # wrong types and ranges
    (config("mixtral", num_hidden_layers=0), UnknownArchitecture, "num_hidden_layers is 0"),
    (config("mixtral", num_hidden_layers="8"), UnknownArchitecture, "whole number"),
    (config("mixtral", num_hidden_layers=10**9), UnknownArchitecture, "whole number"),
    (config("mixtral", num_experts=True), UnknownArchitecture, "num_experts is True"),
    (config("mixtral", num_experts_per_tok=2.0), UnknownArchitecture, "whole number"),
    (config("mixtral", vocab_size="big"), UnknownArchitecture, "vocab_size is 'big'"),
    (config("glm4_moe", first_k_dense_replace=-1), UnknownArchitecture, "first_k_dense_replace"),
    (config("hunyuan_v1_moe", moe_topk=[1, 2]), UnknownArchitecture, "same for all layers"),
    (config("hunyuan_v1_moe", moe_topk=[]), UnknownArchitecture, "same for all layers"),
    (config("laguna", mlp_layer_types=["sparse"] * 7 + ["wide"]), UnknownArchitecture, "'wide'"),
    (config("laguna", mlp_layer_types=[[]] * 8), UnknownArchitecture, "must be one of"),
    (config("laguna", mlp_layer_types=[]), UnknownArchitecture, "one element per layer"),
    (config("laguna", mlp_layer_types=3), UnknownArchitecture, "one element per layer"),
    (config("minimax_m3", moe_layer_freq=[0, 2] * 4), UnknownArchitecture, "moe_layer_freq is 2"),
    (config("nemotron_h", hybrid_override_pattern="MEXE" * 2), UnknownArchitecture, "is 'X'"),
    # contradictions
    (config("laguna", mlp_layer_types=["sparse"] * 7), ContradictoryConfig, "'7 elements'"),
    (config("laguna", mlp_layer_types=["sparse"] * 9), ContradictoryConfig, "each of 8 layers"),
    (config("nemotron_h", hybrid_override_pattern="ME"), ContradictoryConfig, "'2 elements'"),
    (config("minimax_m3", moe_layer_freq=[1] * 5), ContradictoryConfig, "moe_layer_freq"),
    (config("mixtral", num_local_experts=8), ContradictoryConfig, "num_experts and num_local"),
    (
        config("mixtral", experts_per_token=4),
        ContradictoryConfig,
        "num_experts_per_tok and experts",
    ),
    (config("jamba", expert_layer_offset=2), ContradictoryConfig, "expert_layer_offset is 2"),
    (config("qwen3_moe", mlp_only_layers=[8]), ContradictoryConfig, "ids of 8 layers"),
    (config("qwen3_moe", mlp_only_layers=[True]), ContradictoryConfig, "mlp_only_layers"),
    (config("step3p5", moe_layers_enum="3,x"), ContradictoryConfig, "moe_layers_enum"),
    (
        config("laguna", mlp_layer_types=SPARSE_LAST, moe_layer_freq=[1] * 8),
        ContradictoryConfig,
        "mlp_layer_types and moe_layer_freq",
    ),
    (config("mixtral", num_experts_per_tok=17), InvalidInput, "top_k is 17"),
    # dense
    (config("granitemoehybrid", num_experts=0), DenseModel, "num_experts is 0"),
    (config("granitemoe", num_experts=None, num_local_experts=0), DenseModel, "num_local_experts"),
    (config("deepseek_v3", num_experts=None), DenseModel, "num_experts is None"),
    (config("hunyuan_v1_moe", num_experts=1), DenseModel, "num_experts is 1"),
    ({"model_type": "hunyuan_v1_moe"}, DenseModel, "num_experts is 1"),
    (config("glm4_moe", first_k_dense_replace=8), DenseModel, "none of 8 layers"),
    (config("laguna", mlp_layer_types=["dense"] * 8), DenseModel, "mlp_layer_types"),
    (config("llama4_text", interleave_moe_layer_step=0), DenseModel, "none of 8 layers"),
    (config("deepseek_v2", moe_layer_freq=0), DenseModel, "none of 8 layers"),
    (config("nemotron_h", hybrid_override_pattern="M-M*M-M*"), DenseModel, "hybrid_override"),
    (config("gemma4_text", enable_moe_block=False), DenseModel, "enable_moe_block is False"),
    (config("gemma4_text"), DenseModel, "enable_moe_block is None"),
]


@pytest.mark.parametrize(("keys", "error", "part"), REFUSED)
def test_a_config_that_no_rule_knows_is_refused_by_name(
    keys: dict[str, Any], error: type[InvalidInput], part: str
) -> None:
    with pytest.raises(error, match=re.escape(part)):
        model_shape(keys)


def test_every_refusal_of_the_schedule_is_an_unknown_architecture() -> None:
    assert issubclass(DenseModel, UnknownArchitecture)
    assert issubclass(ContradictoryConfig, UnknownArchitecture)
    with pytest.raises(UnknownArchitecture) as caught:
        routed_layers(config("glm4_moe", first_k_dense_replace=None, num_experts=0))
    assert (caught.value.field, caught.value.value) == ("num_experts", 0)
