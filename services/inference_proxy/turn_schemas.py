"""Bodies of the routes for kept turns, field by field with an example."""

from collections.abc import Sequence
from typing import Annotated, Any, Self

import msgspec
import numpy as np
from pydantic import BaseModel, Field, model_validator

from services.inference_proxy.long_json import Parts, dump_long
from services.inference_proxy.schemas import Segment
from services.inference_proxy.turn_parts import unpacked_turn
from services.kit.bodies import Closed, Items
from services.kit.turns import CHOICES_MAX, TURNS_MAX
from sideband.ids import ID_PATTERN

Id = Annotated[str, Field(pattern=ID_PATTERN)]
Choice = Annotated[int, Field(ge=0, lt=CHOICES_MAX)]


class TurnRefBody(Closed):
    """One choice of one request."""

    request_id: Id = Field(
        description="As the answer named it: `request_id`, or `id` on OpenAI routes.",
        examples=["rollout-7.t2"],
    )
    choice: Choice = Field(default=0, description="Which choice.", examples=[0])


class TurnsAsked(Closed):
    """Turns by request id, or all of a session."""

    run_id: Id | None = Field(
        default=None,
        description="The run that asks; another run's turns are refused.",
        examples=["run-1"],
    )
    turns: Items[TurnRefBody] | None = Field(
        default=None,
        min_length=1,
        max_length=TURNS_MAX,
        description="By request id.",
        examples=[[{"request_id": "rollout-7.t0"}]],
    )
    session_id: Id | None = Field(
        default=None,
        description="All turns of a session, in the order in which they were answered.",
        examples=["rollout-7"],
    )
    choice: Choice = Field(default=0, description="Of a session's requests.", examples=[0])

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.turns is None) == (self.session_id is None):
            raise ValueError("must have either turns or session_id")
        return self


class TurnView(BaseModel):
    """One turn, with the members that the orchestrator takes."""

    request_id: str = Field(description="The request.", examples=["rollout-7.t0"])
    prompt_token_ids: list[int] = Field(description="The prompt.", examples=[[1, 2, 3]])
    completion_token_ids: list[int] = Field(description="What was sampled.", examples=[[4, 5]])
    logprobs: list[float] = Field(description="One per completion token.", examples=[[-0.5, -0.25]])
    temperature: float = Field(description="Of the sampling.", examples=[1.0])
    top_p: float = Field(description="Of the sampling.", examples=[0.95])
    top_k: int | None = Field(description="Of the sampling.", examples=[50])
    choice_count: int = Field(description="n of the request.", examples=[1])
    payload_segments: list[Segment] | None = Field(description="Rows by handle.", examples=[[]])
    payload_model: dict[str, Any] | None = Field(
        description="Fingerprint of the model that wrote them.", examples=[{"num_layers": 48}]
    )
    routed_experts: str | None = Field(
        description="Inline routing rows, base64 of npy bytes.", examples=["k05VTVBZAQB2AH..."]
    )
    routed_layer_ids: list[int] | None = Field(
        description="Decoder layers of inline rows; null means all.", examples=[[1, 2, 3]]
    )
    routed_experts_prompt_start: int = Field(
        description="Position of the first inline row.", examples=[0]
    )
    sampling_mask: list[list[int]] | None = Field(
        description="Inline kept ids per completion token.", examples=[[[4, 9], [5]]]
    )
    sampling_mask_logprobs: list[list[float | None]] | None = Field(
        description="Inline logprobs of the kept ids, null for minus infinity.",
        examples=[[[-0.5, -1.25], [0.0]]],
    )
    weight_versions: list[int] | None = Field(
        description="Policy version per completion token.", examples=[[3, 3]]
    )


class TurnList(BaseModel):
    """Turns in the order asked for."""

    turns: list[TurnView] = Field(description="One each.", examples=[[]])


class TurnsReleased(BaseModel):
    """What went."""

    released: int = Field(description="Choices that were still kept.", examples=[3])


_ARRAYS = {
    "prompt_token_ids": "<i4",
    "completion_token_ids": "<i4",
    "logprobs": "<f4",
    "weight_versions": "<i4",
}


def turns_json(encoded: Sequence[Parts]) -> Parts:
    """Kept turns as the JSON of a ``TurnList``."""
    return dump_long({"turns": [_plain(turn) for turn in encoded]})


def turns_packed(encoded: Sequence[Parts]) -> Parts:
    """Kept turns as MessagePack: an array, of which each is an item as it stands."""
    count = len(encoded)
    head = msgspec.msgpack.encode([None] * count)[:-count]
    return (head, *(part for turn in encoded for part in turn))


def _plain(encoded: Parts) -> dict[str, Any]:
    turn, text = unpacked_turn(encoded)
    values: dict[str, Any] = msgspec.to_builtins(turn, builtin_types=(bytes,))
    if text is not None:
        values["routed_experts"] = text
    for name, dtype in _ARRAYS.items():
        if values[name] is not None:
            values[name] = np.frombuffer(values[name], dtype).tolist()
    return {name: values[name] for name in TurnView.model_fields}
