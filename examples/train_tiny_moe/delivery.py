"""From an engine's answers to the orchestrator: the payload file of each turn, and the bodies.

This is what the engine's plugin and the environment do in a real run.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from examples.train_tiny_moe.rollouts import Rollout, Turn
from examples.train_tiny_moe.scenes import GROUP_SIZE, Planned
from sideband import ModelShape, PayloadRoot, write_payload
from sideband.engines.inline import choice_payload, encode_npy_base64
from sideband.ids import RequestId

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Writer:
    """Writes one run's payload files. Blocks: use a thread."""

    root: PayloadRoot
    model: ModelShape

    def turn_body(self, turn: Turn, *, policy_version: int) -> Json:
        """Publish the turn's rows; the turn by handle, as the orchestrator takes it."""
        routed = None if turn.experts_NAK is None else encode_npy_base64(turn.experts_NAK)
        payload = choice_payload(
            routed,
            turn.kept_C,
            layer_ids=None,
            prompt_tokens=len(turn.prompt_ids),
            completion_token_ids=turn.completion_ids,
            prompt_start=0,
            model=self.model,
            sampling_mask_logprobs=turn.scores_C,
        )
        report = write_payload(
            self.root,
            policy_version=policy_version,
            request_id=RequestId(turn.request_id),
            model=self.model,
            choices=[payload],
        )
        return {
            "request_id": turn.request_id,
            "prompt_token_ids": turn.prompt_ids,
            "completion_token_ids": turn.completion_ids,
            "logprobs": turn.logprobs_C,
            "sampled": turn.sampled_C,
            "temperature": turn.temperature,
            "top_k": turn.top_k or None,
            "top_p": turn.top_p,
            "payload_segments": msgspec.to_builtins(report.segments[0]),
            "payload_model": msgspec.to_builtins(self.model),
        }

    def rollout_body(self, rollout: Rollout, *, policy_version: int) -> Json:
        """The whole rollout, its files published."""
        return {
            "rollout_id": rollout.rollout_id,
            "status": "completed",
            "reward": rollout.reward,
            "turns": [
                self.turn_body(turn, policy_version=policy_version) for turn in rollout.turns
            ],
        }


def lease_body(plan: Planned) -> Json:
    """What fixes the policy version of a rollout."""
    return {
        "rollout_id": plan.rollout_id,
        "group_id": plan.group_id,
        "group_size": GROUP_SIZE,
        "env_name": plan.scene.name,
    }
