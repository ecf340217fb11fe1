"""Bodies at the HTTP edge: what clients send and get, field by field with an example."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.inference_proxy.admission import GateState
from services.inference_proxy.engine import Role
from services.inference_proxy.health import State
from services.inference_proxy.limits import POLICY_VERSION_MAX, TOKEN_ID_MAX
from services.kit.bodies import Closed, Items
from sideband.ids import ID_PATTERN

TokenId = Annotated[int, Field(ge=0, le=TOKEN_ID_MAX)]
PolicyVersion = Annotated[int, Field(ge=0, le=POLICY_VERSION_MAX)]


class SamplingParams(BaseModel):
    """vLLM's sampling parameters; those not listed go to the engine as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    n: int | None = Field(
        default=None, ge=1, le=1024, description="Choices; 1 through a pair.", examples=[1]
    )
    max_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens to sample.", examples=[256]
    )
    min_tokens: int | None = Field(
        default=None, ge=0, description="Least tokens to sample.", examples=[0]
    )
    temperature: float | None = Field(
        default=None, ge=0, description="Engines with masks need it above 0.", examples=[1.0]
    )
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="Nucleus to sample from.", examples=[0.95]
    )
    top_k: int | None = Field(
        default=None, description="Most kept ids; engines with masks need it.", examples=[20]
    )
    routed_experts_prompt_start: int | None = Field(
        default=None,
        ge=0,
        description="Leading prompt rows not wanted; a session's own count replaces it.",
        examples=[0],
    )
    extra_args: dict[str, Any] | None = Field(
        default=None,
        description="For the engine's plugins; never payload_dir, which the proxy sets.",
        examples=[{}],
    )


class GenerateRequest(BaseModel):
    """vLLM's token-in/token-out request; members not listed go to the engine as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    request_id: str | None = Field(
        default=None,
        pattern=ID_PATTERN,
        description="The client's id; the answer carries it. One is made when it is left out.",
        examples=["rollout-7.t2"],
    )
    token_ids: Items[TokenId] = Field(
        min_length=1, description="The prompt.", examples=[[101, 2009, 7]]
    )
    sampling_params: SamplingParams = Field(
        description="How to sample.", examples=[{"max_tokens": 256, "temperature": 1.0}]
    )
    stream: bool | None = Field(
        default=None, description="Answer with server-sent events.", examples=[False]
    )


class Segment(BaseModel):
    """Consecutive rows of one field in one payload file."""

    field: str = Field(description="Which rows.", examples=["routed_experts"])
    file: str = Field(
        description="Relative to the payload root.",
        examples=["v3/run-1/7f/rollout-7.t2-5b9c11aa.a1-0f1e2d3c4b5a6978.sbp"],
    )
    offset: int = Field(description="Byte at which the field's section starts.", examples=[512])
    row: int = Field(description="First row within the section.", examples=[0])
    pos: int = Field(description="Sequence position of that row.", examples=[0])
    rows: int = Field(description="Number of rows.", examples=[271])
    dtype: str = Field(description="Type of one id.", examples=["uint8"])
    shape: list[int] = Field(description="Shape of one row.", examples=[[48, 8]])


class GenerateChoice(BaseModel):
    """One choice; further members are the engine's."""

    model_config = ConfigDict(extra="allow")

    index: int = Field(description="Which choice.", examples=[0])
    token_ids: list[int] = Field(description="What was sampled.", examples=[[17, 4, 2]])
    finish_reason: str | None = Field(description="Why it ended.", examples=["stop"])
    routed_experts: str | None = Field(
        description="Inline routing rows, base64 of npy bytes [rows, layers, top-k].",
        examples=["k05VTVBZAQB2AH..."],
    )
    sampling_mask: list[list[int]] | None = Field(
        description="Inline kept ids, one ascending list per sampled token.",
        examples=[[[4, 17], [4], [2, 9]]],
    )
    sampling_mask_logprobs: list[list[float | None]] | None = Field(
        default=None,
        description="Inline logprobs of the kept ids, null for minus infinity.",
        examples=[[[-0.5, -1.0], [0.0], [-0.1, -2.5]]],
    )


class GenerateAnswer(BaseModel):
    """The engine's answer with the rows of all legs merged; further members are the engine's."""

    model_config = ConfigDict(extra="allow")

    request_id: str = Field(description="The client's id.", examples=["rollout-7.t2"])
    choices: list[GenerateChoice] = Field(description="What was sampled.", examples=[[]])
    payload_segments: dict[str, list[Segment]] | None = Field(
        default=None, description="Rows by handle, by choice index.", examples=[{"0": []}]
    )
    payload_model: dict[str, Any] | None = Field(
        default=None,
        description="Fingerprint of the model that wrote the files.",
        examples=[
            {"num_layers": 48, "layer_ids": [0], "top_k": 8, "id_space": 128, "vocab_size": 151936}
        ],
    )
    routed_layer_ids: list[int] | None = Field(
        default=None,
        description="Decoder layers of inline rows; absent means all.",
        examples=[[1, 2, 3]],
    )
    routed_experts_start: dict[str, int] | None = Field(
        default=None,
        description="Position of the first inline row, by choice; a choice not named starts at 0.",
        examples=[{"0": 300}],
    )


class OpenAIRequest(BaseModel):
    """Any OpenAI body; it goes to the engine as it is."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(default=None, description="Model name.", examples=["policy"])
    stream: bool | None = Field(
        default=None, description="Answer with server-sent events.", examples=[True]
    )
    n: int | None = Field(default=None, description="Choices; 1 through a pair.", examples=[1])


class EngineView(BaseModel):
    """One engine."""

    name: str = Field(description="Its name.", examples=["decode-0"])
    url: str = Field(description="Where it listens.", examples=["http://10.0.0.7:8000"])
    role: Role = Field(description="What it does for a request.", examples=["decode"])
    state: State = Field(description="Its health.", examples=["healthy"])
    is_serving: bool = Field(description="Whether new requests go there.", examples=[True])
    why_out: str | None = Field(
        description="Why none go there.", examples=["ejected: status 500: no reason given"]
    )
    policy_version: int = Field(description="What it runs.", examples=[3])
    in_flight: int = Field(description="Requests there now.", examples=[12])
    requests_total: int = Field(description="Requests since the start.", examples=[4096])
    failures: int = Field(description="Failures in a row.", examples=[0])
    ejections_total: int = Field(description="Ejections since the start.", examples=[1])


class Engines(BaseModel):
    """All engines."""

    engines: list[EngineView] = Field(description="In the order of the settings.", examples=[[]])


class SessionView(BaseModel):
    """One session."""

    session_id: str = Field(description="Its id.", examples=["rollout-7"])
    policy_version: int = Field(description="What it is pinned to.", examples=[3])
    turns_delivered: int = Field(description="Turns that reached the client.", examples=[4])
    branches: int = Field(description="Token sequences remembered.", examples=[1])
    tokens: int = Field(description="Tokens remembered.", examples=[2310])
    files: int = Field(description="Files named in its answers.", examples=[4])
    in_flight: int = Field(description="Requests of it that run now.", examples=[0])


class Sessions(BaseModel):
    """The most recently used sessions."""

    sessions: list[SessionView] = Field(description="The latest last.", examples=[[]])
    count: int = Field(description="Sessions remembered in all.", examples=[128])


class SessionDeleted(BaseModel):
    """What went with a session."""

    session_id: str = Field(description="Its id.", examples=["rollout-7"])
    files_discarded: int = Field(description="Files handed to deletion.", examples=[4])
    requests_cancelled: int = Field(description="Requests that ran.", examples=[0])


class VersionReport(Closed):
    """Engines have applied new weights."""

    policy_version: PolicyVersion = Field(description="What they run now.", examples=[4])
    engines: Items[str] | None = Field(
        default=None, description="Which; all by default.", examples=[["decode-0"]]
    )
    force: bool = Field(
        default=False, description="Allow an older version than known.", examples=[False]
    )


class WeightRequest(Closed):
    """New weights for every engine: a folder, or the engines' own transfer."""

    policy_version: PolicyVersion = Field(description="What they will run.", examples=[4])
    weights_path: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="A checkpoint's folder, where the engines see it.",
        examples=["/mnt/run/weights/v4"],
    )
    update_info: dict[str, Any] | None = Field(
        default=None,
        description="What vLLM's weight transfer takes, once it is set up.",
        examples=[{"names": ["lm_head.weight"]}],
    )
    running: Literal["wait", "keep", "abort"] = Field(
        default="wait",
        description="Requests that run: finished first, frozen and gone on with, or ended.",
        examples=["wait"],
    )
    force: bool = Field(
        default=False,
        description="Allow an older version than known: the trainer went back to an earlier "
        "checkpoint. An engine that does not get it is taken out.",
        examples=[False],
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.weights_path is None) == (self.update_info is None):
            raise ValueError("give weights_path or update_info, one of them")
        return self


class WeightReport(BaseModel):
    """What became of an update."""

    policy_version: int = Field(description="What was asked for.", examples=[4])
    applied: int = Field(description="What all serving engines have.", examples=[4])
    updated: list[str] = Field(description="Engines that have it and serve.", examples=[["e0"]])
    failed: dict[str, str] = Field(
        description="Engines that were taken out, and why.",
        examples=[{"e1": "/collective_rpc: status 500"}],
    )
    left_out: list[str] = Field(
        description="Engines that did not serve when it began.", examples=[["e2"]]
    )


class Versions(BaseModel):
    """What the engines run: the one source of truth of the policy version."""

    applied: int = Field(description="All serving engines have it.", examples=[3])
    engines: dict[str, int] = Field(description="By engine.", examples=[{"decode-0": 3}])
    pushed: int | None = Field(
        description="What the orchestrator took; null before, or without one.", examples=[3]
    )
    push_failures: int = Field(description="Failed pushes in a row.", examples=[0])


class GateView(BaseModel):
    """Whether requests are taken."""

    state: GateState = Field(description="Of the proxy.", examples=["open"])
    in_flight: int = Field(description="Requests that run.", examples=[7])
    is_complete: bool = Field(
        description="For a drain: whether all requests ended in time.", examples=[True]
    )
