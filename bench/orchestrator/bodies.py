"""Rollouts by handle as an environment delivers them: one turn, its file named, in binary form."""

from typing import Final

import msgspec
import numpy as np
import orjson

from bench.http.wire import request
from services.kit.turns import TurnWire
from services.orchestrator.wire import ROLLOUT_CONTENT_TYPE, RolloutWire
from sideband.ids import RequestId
from sideband.model import ModelShape
from sideband.payload.paths import fan_out
from sideband.segments import PayloadSegment

RUN_ID: Final = "load"
GROUP_SIZE: Final = 8
PROMPT_TOKENS: Final = 512
COMPLETION_TOKENS: Final = 512
MODEL_CONFIG: Final = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}
MODEL: Final = ModelShape(
    num_layers=48, layer_ids=tuple(range(48)), top_k=8, id_space=128, vocab_size=151936
)


def lease_request(serial: int) -> bytes:
    """The HTTP request that leases rollout ``serial``."""
    body = {
        "rollout_id": f"r{serial}",
        "group_id": f"g{serial // GROUP_SIZE}",
        "group_size": GROUP_SIZE,
        "env_name": "load",
    }
    return request("/v1/leases", orjson.dumps(body), {})


class Deliveries:
    """Makes the HTTP requests that deliver rollouts; arrays are made once."""

    def __init__(self) -> None:
        self._prompt = (np.arange(PROMPT_TOKENS, dtype="<i4") % 1000).tobytes()
        self._completion = (np.arange(COMPLETION_TOKENS, dtype="<i4") % 1000).tobytes()
        self._logprobs = np.full(COMPLETION_TOKENS, -0.5, "<f4").tobytes()

    def request(self, serial: int, policy_version: int) -> bytes:
        """Rollout ``serial``, of the version of its lease."""
        request_id = f"r{serial}.t0"
        folder = f"v{policy_version}/{RUN_ID}/{fan_out(RequestId(request_id))}"
        segment = PayloadSegment(
            field="routed_experts",
            file=f"{folder}/{request_id}-0123456789abcdef.sbp",
            offset=4096,
            row=0,
            pos=0,
            rows=PROMPT_TOKENS + COMPLETION_TOKENS - 1,
            dtype="uint8",
            shape=(48, 8),
        )
        turn = TurnWire(
            request_id=request_id,
            prompt_token_ids=self._prompt,
            completion_token_ids=self._completion,
            logprobs=self._logprobs,
            payload_segments=[segment],
        )
        wire = RolloutWire(
            rollout_id=f"r{serial}", status="completed", reward=float(serial % 2), turns=[turn]
        )
        body = msgspec.msgpack.encode(wire)
        head = (
            f"POST /v1/rollouts HTTP/1.1\r\nhost: bench\r\n"
            f"content-type: {ROLLOUT_CONTENT_TYPE}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body
