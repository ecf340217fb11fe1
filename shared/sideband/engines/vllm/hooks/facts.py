"""Reads a running server's configuration. Attributes moved between vLLM's versions."""

from collections.abc import Mapping
from typing import Any

from sideband.engines.vllm.checks import EngineFacts


def read_facts(vllm_config: Any, *, version: str) -> EngineFacts:
    """What the start-up checks look at; something that a version does not have counts as off."""
    model_config = vllm_config.model_config
    auxiliary = getattr(vllm_config, "aux_output_config", None)  # since 0.31
    speculative = getattr(vllm_config, "speculative_config", None)
    parallel_config = getattr(vllm_config, "parallel_config", None)
    return EngineFacts(
        version=version,
        captures_routing=bool(
            getattr(auxiliary, "enable_return_routed_experts", False)
            or getattr(model_config, "enable_return_routed_experts", False)
        ),
        captures_masks=bool(getattr(model_config, "return_sampling_mask", False)),
        connectors=_connectors(getattr(vllm_config, "kv_transfer_config", None)),
        is_speculative=speculative is not None,
        is_adaptive=bool(getattr(speculative, "enable_adaptive_verification", False)),
        uses_v2_runner=bool(getattr(vllm_config, "use_v2_model_runner", False)),
        logprobs_mode=str(getattr(model_config, "logprobs_mode", "")),
        api_processes=getattr(parallel_config, "_api_process_count", 0),
    )


def read_model_config(vllm_config: Any) -> Mapping[str, object]:
    """The Hugging Face config with every default of its class filled in."""
    config: Mapping[str, object] = vllm_config.model_config.hf_config.to_dict()
    return config


async def read_weight_version(engine_client: Any) -> str | None:
    """The name of the weights that the engine runs; None where a version keeps none."""
    ask = getattr(engine_client, "get_weight_version", None)
    return None if ask is None else str(await ask())


def _connectors(kv_transfer_config: Any) -> tuple[str, ...]:
    """The connector and, of several in one, its parts."""
    name = getattr(kv_transfer_config, "kv_connector", None)
    if name is None:
        return ()
    extra = getattr(kv_transfer_config, "kv_connector_extra_config", None) or {}
    parts = extra.get("connectors") or []
    inner = [str(part.get("kv_connector")) for part in parts if isinstance(part, Mapping)]
    return (str(name), *inner)
