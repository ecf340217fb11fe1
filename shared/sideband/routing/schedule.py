"""Which decoder layers have a learned router. A per-layer list beats a pattern beats scalars.

Scalars compose: a layer is routed when none of them makes it dense. A key that looks as if it
chose layers and that no rule reads is an error, never a guess.

Errors: UnknownArchitecture, ContradictoryConfig, DenseModel.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

from sideband.model import LAYERS_MAX
from sideband.routing.config import TextConfig
from sideband.routing.errors import ContradictoryConfig, DenseModel, UnknownArchitecture

_TYPE_NAMES: Final[Mapping[str | int, bool]] = {
    "dense": False,
    "hash_moe": False,
    "sparse": True,
    "moe": True,
}
# A type per layer. hash_moe owns experts, but routes by token id.
_TYPE_LISTS: Final = ("mlp_layer_types",)
_FLAG_LISTS: Final = ("moe_layer_freq", "is_moe_layer")  # 0 or 1 per layer
_FLAGS: Final[Mapping[str | int, bool]] = {0: False, 1: True}
_INDEX_LISTS: Final = ("moe_layers", "moe_layers_enum", "moe_layer_list")  # the routed layers
_BLOCK_LISTS: Final = ("layers_block_type", "layer_types")
_BLOCK_NAMES: Final[Mapping[str | int, bool]] = {
    "moe": True,
    "mlp": False,
    "mamba": False,
    "attention": False,
    "linear_attention": False,
    "full_attention": False,
}
_BLOCK_PATTERN: Final = "hybrid_override_pattern"
_BLOCK_LETTERS: Final[Mapping[str | int, bool]] = {"E": True, "M": False, "*": False, "-": False}

_LEADING_DENSE: Final = (
    "first_k_dense_replace",
    "num_dense_layers",
    "num_hash_layers",
    "moe_layer_num_skipped",
    "dense_mlp_idx",
)
# every step-th layer is routed, counted from the layer before the first or from the first
_STEPS: Final = {
    "decoder_sparse_step": 1,
    "interleave_moe_layer_step": 1,
    "moe_layer_interval": 1,
    "moe_layer_freq": 0,
}
_OTHER_SCALARS: Final = (
    "mlp_only_layers",
    "expert_layer_period",
    "expert_layer_offset",
    "moe_layer_start_index",
    "moe_layer_end_index",
)
_READ: Final = frozenset(
    (*_TYPE_LISTS, *_FLAG_LISTS, *_INDEX_LISTS, *_LEADING_DENSE, *_STEPS, *_OTHER_SCALARS)
)
# Keys of these kinds choose layers in some model; multi-token-prediction heads are not layers.
_LOOKS_LIKE_SCHEDULE: Final = re.compile(
    r"dense_(layers|replace|first|mlp_idx)|first_k_|sparse_step|mlp_(layers|layer_types|only)|"
    r"expert_layer_|hash_layers|moe_(every|freq|interval|period)|"
    r"moe_layer(s|$|_(freq|step|interval|list|offset|start|end|num|index|ids?))"
)
_NEUTRAL: Final = {"moe_every_n_layer": 1, "moe_layer_offset": 0}


def schedule(config: TextConfig) -> tuple[int, tuple[int, ...]]:
    """The number of decoder layers and the ascending ids of those with a learned router."""
    lists = _per_layer_lists(config)
    if lists:
        (first, (count, layer_ids)), *others = lists.items()
        for key, other in others:
            if other != (count, layer_ids):
                raise ContradictoryConfig(f"{first} and {key}", None, "must name the same layers")
        deciding = first
    else:
        if config.family.has_block_types:
            raise UnknownArchitecture(
                f"{_BLOCK_LISTS[0]} or {_BLOCK_PATTERN}", None, "must say what each layer is"
            )
        count = layer_count(config)
        layer_ids, deciding = _by_scalars(config, count), "the schedule of dense layers"
    if not layer_ids:
        raise DenseModel(deciding, None, f"leaves none of {count} layers with a router")
    return count, layer_ids


def layer_count(config: TextConfig) -> int:
    """Decoder layers by the family's own key, MTP layers excluded."""
    key, default = config.family.layers_key, config.family.layers
    count = config.count(key, default=default, most=LAYERS_MAX)
    if count == 0:
        raise UnknownArchitecture(key, count, "must be at least 1")
    return count


def _per_layer_lists(config: TextConfig) -> dict[str, tuple[int, tuple[int, ...]]]:
    """(layers, routed layers) of the first kind of list that is there: lists, then a pattern."""
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    if config.family.has_block_types:
        keys = [key for key in _BLOCK_LISTS if config.get(key) is not None]
        for key in keys or [_BLOCK_PATTERN] * (config.get(_BLOCK_PATTERN) is not None):
            names = _BLOCK_LETTERS if key == _BLOCK_PATTERN else _BLOCK_NAMES
            found[key] = _routed(config, key, names)
        return found
    for key in _TYPE_LISTS:
        if config.get(key) is not None:
            found[key] = _routed(config, key, _TYPE_NAMES)
    for key in _FLAG_LISTS:
        if isinstance(config.get(key), list | tuple):
            found[key] = _routed(config, key, _FLAGS)
    for key in _INDEX_LISTS:
        if config.get(key) is not None:
            count = layer_count(config)
            ids = _indices(config, key, count)
            found[key] = count, tuple(layer for layer in range(count) if layer in ids)
    return found


def _routed(
    config: TextConfig, key: str, names: Mapping[str | int, bool]
) -> tuple[int, tuple[int, ...]]:
    """(layers, routed layers) of a list or pattern with one element per layer."""
    value = config.get(key)
    if not isinstance(value, list | tuple | str) or not 1 <= len(value) <= 2 * LAYERS_MAX:
        raise UnknownArchitecture(key, value, "must have one element per layer")
    unknown = [each for each in value if not isinstance(each, str | int) or each not in names]
    if unknown:
        raise UnknownArchitecture(key, unknown[0], f"must be one of {list(names)}")
    # block lists are where such a model's depth comes from when nothing else gives it
    has_depth = (
        config.get(config.family.layers_key) is not None or not config.family.has_block_types
    )
    count = layer_count(config) if has_depth else len(value)
    fitting = {count, count + config.mtp_layers()} if config.family.lists_hold_mtp else {count}
    if len(value) not in fitting:
        raise ContradictoryConfig(
            key, f"{len(value)} elements", f"must have one for each of {count} layers"
        )
    return count, tuple(layer for layer in range(count) if names[value[layer]])


def _indices(config: TextConfig, key: str, count: int) -> frozenset[int]:
    """Layer ids in a list, or in text separated by commas."""
    value = config.get(key)
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        value = [int(part) if part.isdecimal() and len(part) < 6 else part for part in parts]
    stop = count + (config.mtp_layers() if config.family.lists_hold_mtp else 0)
    if not isinstance(value, list | tuple) or not all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each < stop for each in value
    ):
        raise ContradictoryConfig(key, value, f"must hold ids of {stop} layers")
    return frozenset(value)


def _by_scalars(config: TextConfig, count: int) -> tuple[int, ...]:
    _refuse_unread(config)
    rules = [*_leading(config), *_steps(config), *_windows(config, count)]
    return tuple(layer for layer in range(count) if all(rule(layer) for rule in rules))


Rule = Callable[[int], bool]


def _scalar(config: TextConfig, key: str, *, neutral: int) -> int:
    default = config.family.schedule.get(key, neutral)
    assert not isinstance(default, tuple), "only lists of layers have tuples as defaults"
    return config.count(key, default=default, most=2 * LAYERS_MAX)


def _leading(config: TextConfig) -> list[Rule]:
    dense = max(_scalar(config, key, neutral=0) for key in _LEADING_DENSE)
    return [lambda layer: layer >= dense]


def _every(step: int, shift: int) -> Rule:
    # engines read a step of 0 as "never"
    return lambda layer: step > 0 and (layer + shift) % step == 0


def _steps(config: TextConfig) -> list[Rule]:
    rules: list[Rule] = []
    for key, shift in _STEPS.items():
        rules.append(_every(_scalar(config, key, neutral=1), shift))
    period = _scalar(config, "expert_layer_period", neutral=1)
    offset = _scalar(config, "expert_layer_offset", neutral=0)
    if not 0 <= offset < period:
        raise ContradictoryConfig(
            "expert_layer_offset", offset, f"must lie below expert_layer_period, {period}"
        )
    rules.append(lambda layer: layer % period == offset)
    return rules


def _windows(config: TextConfig, count: int) -> list[Rule]:
    """The layers between two ends, and those named one by one."""
    start = _scalar(config, "moe_layer_start_index", neutral=0)
    end = config.get("moe_layer_end_index")
    if end is None or end == -1:  # both mean the last layer
        last = count - 1
    else:
        last = config.count("moe_layer_end_index", default=None, most=2 * LAYERS_MAX)
    if config.get("mlp_only_layers") is None:
        default = config.family.schedule.get("mlp_only_layers", ())
        dense = frozenset(default) if isinstance(default, tuple) else frozenset[int]()
    else:
        dense = _indices(config, "mlp_only_layers", count)
    return [lambda layer: start <= layer <= last and layer not in dense]


def _refuse_unread(config: TextConfig) -> None:
    for key, value in config.keys.items():
        is_read = key in _READ or key.startswith("mtp_") or value in (None, [], _NEUTRAL.get(key))
        if not is_read and _LOOKS_LIKE_SCHEDULE.search(key):
            raise UnknownArchitecture(key, value, "may choose layers, and no rule reads it")
