"""Reading keys of a Hugging Face ``config.json``: wrappers, other names, and types.

Errors: UnknownArchitecture, ContradictoryConfig, DenseModel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sideband.model import ID_SPACE_MAX, LAYERS_MAX
from sideband.routing.errors import ContradictoryConfig, DenseModel, UnknownArchitecture
from sideband.routing.families import Family, family_of

# Where multimodal models keep the config of the part that generates text.
_WRAPPERS: Final = ("thinker_config", "text_config", "llm_config", "language_config")
_WRAPPER_DEPTH_MAX: Final = 4

EXPERT_KEYS: Final = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
# "top_k" is not one of them: in a config it is a generation setting.
TOP_K_KEYS: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
_MTP_KEYS: Final = ("num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers")


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The keys of the text model and the family that explains those which are missing."""

    keys: Mapping[str, object]
    outer: Mapping[str, object]  # the whole config: a vocabulary may be named only there
    family: Family

    def get(self, key: str) -> object | None:
        """The value of ``key``; an explicit null counts as missing, as in the config classes."""
        return self.keys.get(key)

    def count(self, key: str, *, default: int | None, most: int) -> int:
        """A whole number in [0, most]; raises UnknownArchitecture when there is none."""
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise UnknownArchitecture(key, None, "must be given: this model type has no default")
        return _whole(key, value, most=most)

    def mtp_layers(self) -> int:
        """Layers of speculative heads after the decoder layers; they are not decoder layers."""
        return max(self.count(key, default=0, most=LAYERS_MAX) for key in _MTP_KEYS)


def text_config(hf_config: Mapping[str, object]) -> TextConfig:
    """The text model's part of a config and its family. Raises UnknownArchitecture."""
    keys, names = hf_config, _names(hf_config)
    for _ in range(_WRAPPER_DEPTH_MAX):
        inner = next((keys[key] for key in _WRAPPERS if isinstance(keys.get(key), Mapping)), None)
        if not isinstance(inner, Mapping):
            break
        keys = inner
        if any(_names(inner)):  # a nameless part is explained by its wrapper's name
            names = _names(inner)
    family = family_of(*names)
    if family is None:
        raise UnknownArchitecture(
            "model_type",
            names[0] or None,
            f"no rule knows this model type nor its architectures {list(names[1])}",
        )
    return TextConfig(keys, hf_config, family)


def _names(keys: Mapping[str, object]) -> tuple[str, tuple[str, ...]]:
    model_type, classes = keys.get("model_type"), keys.get("architectures")
    names = classes if isinstance(classes, list | tuple) else ()
    return (
        model_type if isinstance(model_type, str) else "",
        tuple(name for name in names if isinstance(name, str)),
    )


def expert_count(config: TextConfig) -> int:
    """Routed experts per layer. Raises DenseModel when the config says that there are none."""
    switch = config.family.switch_key
    if switch is not None and config.get(switch) is not True:
        raise DenseModel(switch, config.get(switch), "must be true: else no layer has experts")
    present = [key for key in EXPERT_KEYS if key in config.keys]
    if present and all(config.get(key) is None for key in present):  # null, unlike absent, says so
        raise DenseModel(present[0], None, "means a dense model without a router")
    count = _agreeing(config, EXPERT_KEYS, config.family.experts)
    if count < 2:  # one expert is an MLP: there is no choice to replay
        named = [key for key in present if config.get(key) is not None]
        raise DenseModel((*named, *EXPERT_KEYS)[0], count, "means a dense model without a router")
    return count


def router_top_k(config: TextConfig) -> int:
    """Experts that the router picks for each token and layer."""
    return _agreeing(config, TOP_K_KEYS, config.family.top_k)


def _agreeing(config: TextConfig, names: tuple[str, ...], default: int | None) -> int:
    """The one number that all present ``names`` give; a list must be the same for all layers."""
    found = {
        name: _same_for_all(name, config.get(name))
        for name in names
        if config.get(name) is not None
    }
    if len(set(found.values())) > 1:
        raise ContradictoryConfig(" and ".join(found), tuple(found.values()), "must be equal")
    if found:
        return next(iter(found.values()))
    if default is None:
        raise UnknownArchitecture(
            " or ".join(names), None, "must be given: this model type has no default"
        )
    return default


def _same_for_all(key: str, value: object) -> int:
    values = value if isinstance(value, list | tuple) else [value]
    numbers = {_whole(key, each, most=ID_SPACE_MAX) for each in values}
    if len(numbers) != 1:
        raise UnknownArchitecture(key, value, "must be the same for all layers")
    return numbers.pop()


def _whole(key: str, value: object, *, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise UnknownArchitecture(key, value, f"must be a whole number in [0, {most}]")
    return value
