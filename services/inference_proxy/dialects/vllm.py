"""vLLM 0.30 and later, and engines that speak its token-in/token-out route."""

from collections.abc import Mapping
from typing import Any, Final

from services.inference_proxy.dialects.base import (
    Ask,
    Body,
    EngineCall,
    Injection,
    WeightSteps,
    WeightUpdate,
)
from services.inference_proxy.dialects.openai_forms import (
    is_chat,
    read_openai,
    wants_logprobs,
    without,
)
from sideband.model import ModelShape

# What vLLM's transfer connectors expect on the prefill leg; the decode leg gets what comes back.
PREFILL_KV: Final[Mapping[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_STOPS: Final = ("stop", "stop_token_ids")


class VllmDialect:
    """Decode samples the first token itself; prefill's token is thrown away."""

    name = "vllm"
    generate_path = "/inference/v1/generate"
    health_path = "/health"
    identity_path: str | None = "/inference/v1/sideband"  # of the plugin
    decode_continues_prefill = False

    def whole(self, body: Body, ask: Ask) -> Body:
        """The client's body under our id, with the payload folder and the first row wanted."""
        return {**body, "request_id": ask.request_id, "sampling_params": _params(body, ask)}

    def prefill(self, body: Body, ask: Ask) -> Body:
        """One token, whatever the client's least count, stops or log probabilities say.

        A stop would end the leg as "stop", and transfer connectors keep the cache only of a
        request that ended by length.
        """
        asked = self.whole(body, ask)
        params = without(asked["sampling_params"], "min_tokens", "logprobs", *_STOPS)
        asked["sampling_params"] = {**params, "max_tokens": 1, "ignore_eos": True}
        asked = without(asked, "stream_options")
        asked["stream"] = False
        return _with_kv(asked, dict(PREFILL_KV))

    def decode(self, body: Body, ask: Ask, prefill_answer: Mapping[str, Any]) -> Body:
        """The client's body; log probabilities of the prompt are prefill's work."""
        asked = self.whole(body, ask)
        asked["sampling_params"] = without(asked["sampling_params"], "prompt_logprobs")
        transfer = prefill_answer.get("kv_transfer_params")
        return _with_kv(asked, transfer) if isinstance(transfer, dict) else asked

    def read(self, answer: object) -> object:
        """It is one already."""
        return answer

    def events(self) -> "VllmEvents":
        """Nothing is kept from event to event."""
        return VllmEvents()

    def openai_train(self, body: Body, path: str, ask: Ask) -> Body:
        """Token ids, log probabilities and a folder, where there is one to write to."""
        asked = {**body, "request_id": ask.request_id, "return_token_ids": True, "stream": False}
        asked = without(asked, "stream_options", "routed_experts_prompt_start")
        if is_chat(path):
            asked["logprobs"] = True
        elif body.get("logprobs") is None:
            asked["logprobs"] = 0
        if ask.injection is not None:
            own = body.get("vllm_xargs")
            own = own if isinstance(own, dict) else {}
            asked["vllm_xargs"] = {**own, **_extra(ask.injection)}
        return asked

    def openai_prefill(self, body: Body) -> Body:
        """One token; both names of the limit, since chat has two."""
        dropped = ("stream_options", "min_tokens", "logprobs", "top_logprobs", *_STOPS)
        limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        asked = {**without(body, *dropped), limit: 1, "stream": False, "ignore_eos": True}
        return {**asked, "kv_transfer_params": dict(PREFILL_KV)}

    def openai_decode(self, body: Body, prefill_answer: Mapping[str, Any]) -> Body:
        """The client's body and where the KV cache is.

        An engine that captures routing may die when it is asked for rows of tokens that it
        loaded from outside, so their number goes along wherever prefill told it.
        """
        transfer = prefill_answer.get("kv_transfer_params")
        asked = dict(body)
        if isinstance(transfer, dict):
            asked["kv_transfer_params"] = transfer
        usage = prefill_answer.get("usage")
        tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if type(tokens) is int:
            asked["routed_experts_prompt_start"] = tokens
        return asked

    def read_openai(self, answer: object, path: str) -> object:
        """Token ids stand beside the text, as do routing rows; kept sets do not come."""
        return read_openai(answer)

    def openai_shown(self, answer: Body, asked: Body) -> Body:
        """Without token ids and log probabilities that only the proxy wanted."""
        hidden = set() if asked.get("return_token_ids") else {"token_ids", "prompt_token_ids"}
        choices = [without(choice, *hidden) for choice in answer["choices"]]
        if not wants_logprobs(asked):
            choices = [{**choice, "logprobs": None} for choice in choices]
        return {**without(answer, *hidden), "choices": choices}

    def is_mask_refusal(self, body: Body, status: int, error: object) -> bool:
        """A server that returns masks answers an empty 500 unless temperature and top_k cut."""
        if status != 500 or not isinstance(error, dict):
            return False
        inner = error.get("error")
        message = inner.get("message") if isinstance(inner, dict) else None
        params = body.get("sampling_params", body)
        temperature, top_k = params.get("temperature"), params.get("top_k")
        is_cut = (temperature is None or temperature > 0) and (top_k is not None and top_k > 0)
        return message == "" and not is_cut

    def weight_steps(self, update: WeightUpdate) -> WeightSteps:
        """vLLM's own routes for RL (VLLM_SERVER_DEV_MODE=1).

        The prefix cache goes with the old weights: running requests that were kept are run again.
        """
        if update.weights_path is not None:
            path = {"weights_path": update.weights_path}
            transfer = [
                EngineCall(
                    path="/collective_rpc", body={"method": "reload_weights", "kwargs": path}
                )
            ]
        else:
            transfer = [
                EngineCall(path="/start_weight_update"),
                EngineCall(path="/update_weights", body={"update_info": update.update_info}),
                EngineCall(path="/finish_weight_update", body={}),
            ]
        version = {"new_version": str(update.policy_version)}
        return WeightSteps(
            pause=(EngineCall(path=f"/pause?mode={update.running}"),),
            update=(
                *transfer,
                EngineCall(
                    path="/reset_prefix_cache?reset_running_requests=true",
                    refusal=b'"success":false',
                ),
                EngineCall(path="/update_weight_version", body=version),
            ),
            resume=(EngineCall(path="/resume"),),
            abandon=(EngineCall(path="/pause?mode=abort"),),
        )


class VllmEvents:
    """Events are passed on as they are."""

    def read(self, event: Body) -> Body:
        """The same event."""
        return event


def make(model: ModelShape | None) -> VllmDialect:
    """vLLM's answers tell their shapes, so no model is needed."""
    return VllmDialect()


def _params(body: Body, ask: Ask) -> Body:
    params = dict(body["sampling_params"])
    extra = dict(params.get("extra_args") or {})
    if ask.injection is not None:
        extra |= _extra(ask.injection)
    if extra:
        params["extra_args"] = extra
    params.pop("routed_experts_prompt_start", None)
    if ask.prompt_start:
        params["routed_experts_prompt_start"] = ask.prompt_start
    return params


def _extra(injection: Injection) -> Body:
    return {"payload_dir": injection.payload_dir, "payload_run_id": injection.run_id}


def _with_kv(body: Body, transfer: Mapping[str, Any]) -> Body:
    """Both places: the route documents the top level, the engine reads ``extra_args``."""
    params = body["sampling_params"]
    extra = {**(params.get("extra_args") or {}), "kv_transfer_params": transfer}
    params = {**params, "extra_args": extra}
    return {**body, "sampling_params": params, "kv_transfer_params": transfer}
