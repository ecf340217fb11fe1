"""From a model's config to its routed layers and its fingerprint.

Errors: UnknownArchitecture and its leaves (sideband.routing.errors).
"""

from collections.abc import Mapping

from sideband.model import ID_SPACE_MAX, VOCAB_SIZE_MAX, ModelShape
from sideband.routing.config import expert_count, router_top_k, text_config
from sideband.routing.errors import UnknownArchitecture
from sideband.routing.schedule import schedule


def routed_layers(hf_config: Mapping[str, object]) -> tuple[int, ...]:
    """The global decoder layer ids, ascending, that have a learned router.

    ``hf_config`` is a parsed Hugging Face ``config.json``, also of a multimodal wrapper. Dense,
    Mamba, attention-only and hash-routed layers are left out, and so are MTP layers. Raises
    UnknownArchitecture for a config that no rule knows, DenseModel when nothing is routed.
    """
    config = text_config(hf_config)
    expert_count(config)
    return schedule(config)[1]


def model_shape(hf_config: Mapping[str, object], *, vocab_size: int | None = None) -> ModelShape:
    """The fingerprint of a model; ``vocab_size`` overrides the config's.

    ``id_space`` is the routed experts plus zero-compute ones: ids run over both. Raises what
    ``routed_layers`` raises, and InvalidInput when the numbers cannot belong to one model.
    """
    config = text_config(hf_config)
    experts = expert_count(config)
    num_layers, layer_ids = schedule(config)
    zero_experts = config.count(
        "zero_expert_num", default=config.family.zero_experts, most=ID_SPACE_MAX
    )
    return ModelShape(
        num_layers=num_layers,
        layer_ids=layer_ids,
        top_k=router_top_k(config),
        id_space=experts + zero_experts,
        vocab_size=_vocab_size(hf_config, vocab_size),
    ).check()


def _vocab_size(hf_config: Mapping[str, object], override: int | None) -> int:
    config = text_config(hf_config)
    candidates = (
        override,
        config.get("vocab_size"),
        config.outer.get("vocab_size"),
        config.family.vocab_size,
    )
    value = next((each for each in candidates if each is not None), None)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= VOCAB_SIZE_MAX:
        raise UnknownArchitecture(
            "vocab_size", value, f"must be a whole number in [1, {VOCAB_SIZE_MAX}]"
        )
    return value
