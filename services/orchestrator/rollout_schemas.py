"""The JSON form of a delivered rollout: the fields of ``wire.py``, with lists in place of bytes."""

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from services.kit.bodies import Closed, Items
from services.kit.turns import CHOICES_MAX, TURNS_MAX, TurnWire
from services.orchestrator.wire import DeliveredWire, TurnRefWire
from sideband.fields import Field as RowField
from sideband.ids import ID_PATTERN
from sideband.model import ModelShape
from sideband.segments import PayloadSegment

Id = Annotated[str, Field(pattern=ID_PATTERN)]
Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
# The binary form holds no larger number: an int without a bound would crash what writes it.
Int63 = Annotated[int, Field(ge=-(1 << 62), lt=1 << 62)]


class SegmentBody(Closed):
    """Rows of one field in one payload file, as the engine's answer named them."""

    field: RowField = Field(description="What the rows are.", examples=["routed_experts"])
    file: str = Field(
        max_length=1024,
        description="Relative to the payload root.",
        examples=["v3/run/a1/g7.r0.t0-0123456789abcdef.sbp"],
    )
    offset: Int63 = Field(description="Byte offset of the field's section.", examples=[4096])
    row: Int63 = Field(description="First row within the section.", examples=[0])
    pos: Int63 = Field(description="Sequence position of that row.", examples=[0])
    rows: Int63 = Field(description="Number of rows.", examples=[127])
    dtype: Literal["uint8", "uint16", "int32", "float32"] = Field(
        description="Of one element.", examples=["uint8"]
    )
    shape: Items[Int63] = Field(
        max_length=4,
        description="Of one row: (layers, top-k), or (vocab_size,).",
        examples=[[48, 8]],
    )

    def to_wire(self) -> PayloadSegment:
        """The segment, not yet checked."""
        return PayloadSegment(**{**self.model_dump(), "shape": tuple(self.shape)})


class ModelBody(Closed):
    """The model fingerprint of an engine."""

    num_layers: Int63 = Field(description="Decoder layers.", examples=[48])
    layer_ids: Items[Int63] = Field(
        max_length=1024, description="Layers with a learned router.", examples=[[0, 1, 2]]
    )
    top_k: Int63 = Field(description="Experts per token.", examples=[8])
    id_space: Int63 = Field(description="Routed and zero-compute experts.", examples=[128])
    vocab_size: Int63 = Field(description="Size of the vocabulary.", examples=[151936])

    def to_wire(self) -> ModelShape:
        """The fingerprint."""
        return ModelShape(**{**self.model_dump(), "layer_ids": tuple(self.layer_ids)})


class TurnBody(Closed):
    """One delivered request, in the order in which it was sent."""

    request_id: Id = Field(description="The request's id.", examples=["g7.r0.t0"])
    prompt_token_ids: Items[Int32] = Field(description="The prompt.", examples=[[1, 2, 3]])
    completion_token_ids: Items[Int32] = Field(description="What was sampled.", examples=[[4, 5]])
    logprobs: Items[float] = Field(
        description="One per completion token.", examples=[[-0.5, -0.25]]
    )
    sampled: Items[bool] | None = Field(
        default=None,
        description="False: this completion token must not train. Absent: all train.",
        examples=[[True, True]],
    )
    temperature: float = Field(default=1.0, description="Of the sampling.", examples=[1.0])
    top_p: float = Field(default=1.0, description="Below 1 masks are expected.", examples=[0.95])
    top_k: Int32 | None = Field(default=None, description="If set, likewise.", examples=[50])
    choice_count: int = Field(
        default=1,
        ge=1,
        le=CHOICES_MAX,
        description="n of the request: its file serves the rollouts of all its choices.",
        examples=[1],
    )
    payload_segments: Items[SegmentBody] | None = Field(
        default=None, description="By handle: this choice's segments."
    )
    payload_model: ModelBody | None = Field(
        default=None, description="By handle: the engine's model fingerprint."
    )
    routed_experts: str | None = Field(
        default=None, description="Inline: base64 of an npy array.", examples=["k05VTVBZAQB2AA=="]
    )
    routed_layer_ids: Items[Int32] | None = Field(
        default=None, description="Inline: the layers of its columns; absent: all.", examples=[[1]]
    )
    routed_experts_prompt_start: int = Field(
        default=0,
        ge=0,
        lt=1 << 62,
        description="Inline: prompt rows that were not asked for.",
        examples=[0],
    )
    sampling_mask: Items[Items[Int32]] | None = Field(
        default=None,
        description="Inline: kept ids per completion token, ascending.",
        examples=[[[4, 9], [5]]],
    )
    sampling_mask_logprobs: Items[Items[float | None]] | None = Field(
        default=None,
        description="Inline: the logprob of each kept id; null for minus infinity.",
        examples=[[[-0.5, -1.25], [0.0]]],
    )
    weight_versions: Items[Int32] | None = Field(
        default=None, description="Policy version per completion token.", examples=[[3, 3]]
    )
    advantages: Items[float] | None = Field(
        default=None, description="Per completion token.", examples=[[0.5, 0.5]]
    )

    def to_wire(self) -> TurnWire:
        """The binary form's struct."""
        return TurnWire(
            request_id=self.request_id,
            prompt_token_ids=_int32(self.prompt_token_ids),
            completion_token_ids=_int32(self.completion_token_ids),
            logprobs=_float32(self.logprobs),
            sampled=None if self.sampled is None else bytes(self.sampled),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            choice_count=self.choice_count,
            payload_segments=None
            if self.payload_segments is None
            else [segment.to_wire() for segment in self.payload_segments],
            payload_model=None if self.payload_model is None else self.payload_model.to_wire(),
            routed_experts=self.routed_experts,
            routed_layer_ids=self.routed_layer_ids,
            routed_experts_prompt_start=self.routed_experts_prompt_start,
            sampling_mask=self.sampling_mask,
            sampling_mask_logprobs=self.sampling_mask_logprobs,
            weight_versions=None if self.weight_versions is None else _int32(self.weight_versions),
            advantages=None if self.advantages is None else _float32(self.advantages),
        )


class TurnRefBody(Closed):
    """One choice of a request whose turn the proxy has kept."""

    request_id: Id = Field(
        description="As the answer named it: request_id, or id on OpenAI routes.",
        examples=["g7.r0.t0"],
    )
    choice: int = Field(default=0, ge=0, lt=CHOICES_MAX, description="Which one.", examples=[0])


class RolloutBody(Closed):
    """A finished rollout: with its turns, or with where the proxy has kept them."""

    rollout_id: Id = Field(description="As in its lease.", examples=["g7.r0"])
    status: Literal["completed", "failed", "aborted", "cancelled"] = Field(
        description="Only a completed one trains; the others' files are deleted.",
        examples=["completed"],
    )
    reward: float | None = Field(
        default=None, description="For the group-relative advantage.", examples=[1.0]
    )
    advantage: float | None = Field(
        default=None, description="In place of the group's, if the client knows it.", examples=[0.5]
    )
    turns: Items[TurnBody] = Field(
        default=[], max_length=TURNS_MAX, description="Its requests, in order."
    )

    turn_refs: Items[TurnRefBody] | None = Field(
        default=None,
        min_length=1,
        max_length=TURNS_MAX,
        description="In place of turns: its requests, in order; the proxy has kept them.",
    )
    session_id: Id | None = Field(
        default=None,
        description="In place of turns: all turns of this session at the proxy.",
        examples=["g7.r0"],
    )
    choice: int = Field(
        default=0,
        ge=0,
        lt=CHOICES_MAX,
        description="Of the session's requests.",
        examples=[0],
    )

    def to_wire(self) -> DeliveredWire:
        """The binary form's struct."""
        return DeliveredWire(
            rollout_id=self.rollout_id,
            status=self.status,
            reward=self.reward,
            advantage=self.advantage,
            turns=[turn.to_wire() for turn in self.turns],
            turn_refs=None
            if self.turn_refs is None
            else [
                TurnRefWire(request_id=each.request_id, choice=each.choice)
                for each in self.turn_refs
            ],
            session_id=self.session_id,
            choice=self.choice,
        )


def _int32(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def _float32(values: list[float]) -> bytes:
    with np.errstate(over="ignore"):  # becomes infinite, and is refused as not finite
        column: NDArray[np.float32] = np.array(values, "<f4")
    return column.tobytes()


def inlined_schema() -> dict[str, Any]:
    """The JSON schema of ``RolloutBody`` without references, for the OpenAPI document."""
    schema = RolloutBody.model_json_schema()
    definitions: dict[str, Any] = schema.pop("$defs")

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                name = node["$ref"].rsplit("/", 1)[1]
                rest = {key: value for key, value in node.items() if key != "$ref"}
                return {**resolve(definitions[name]), **rest}
            return {key: resolve(value) for key, value in node.items()}
        return [resolve(item) for item in node] if isinstance(node, list) else node

    resolved: dict[str, Any] = resolve(schema)
    return resolved
