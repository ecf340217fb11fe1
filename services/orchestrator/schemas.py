"""Leases, receipts, rollouts and steps as JSON: every field described."""

from typing import Annotated, Self

from pydantic import BaseModel, Field

from services.kit.bodies import Closed, Items
from services.orchestrator.limits import GROUP_SIZE_MAX
from services.orchestrator.records import Lease, Rollout, StepRecord, Tally
from sideband.ids import ID_PATTERN

Id = Annotated[str, Field(pattern=ID_PATTERN)]


class LeaseBody(Closed):
    """A rollout that is about to start."""

    rollout_id: Id = Field(description="The rollout; unique in the run.", examples=["g7.r0"])
    group_id: Id = Field(description="Rollouts of one prompt share it.", examples=["g7"])
    group_size: int = Field(
        ge=1, le=GROUP_SIZE_MAX, description="Rollouts of the group.", examples=[8]
    )
    env_name: str = Field(
        default="", max_length=128, description="Environment, for the trainer.", examples=["math"]
    )
    session_id: Id | None = Field(
        default=None, description="The rollout's session at the proxy.", examples=["g7.r0"]
    )


class RenewBody(Closed):
    """A rollout that is still running."""

    files: Items[str] = Field(
        default=[],
        max_length=4096,
        description="Payload files that it has written so far; held for the lease.",
        examples=[["v3/run/a1/g7.r0.t0-0123456789abcdef.sbp"]],
    )


class LeaseView(BaseModel):
    """One lease."""

    lease_id: str = Field(description="Names the lease.", examples=["5f2c9a1b7d3e4f60a1b2c3d4"])
    rollout_id: str = Field(description="Its rollout.", examples=["g7.r0"])
    group_id: str = Field(description="Its group.", examples=["g7"])
    run_id: str = Field(description="The run.", examples=["run"])
    policy_version: int = Field(
        description="k: what the rollout runs with; to be sent with each request.", examples=[3]
    )
    index: int = Field(description="Counts dispatches from 0.", examples=[41])
    deadline_s: float = Field(
        description="When it ends unless renewed, Unix time.", examples=[1767225600.0]
    )
    state: str = Field(description="open, or how it ended.", examples=["open"])
    reason: str = Field(description="Why it ended.", examples=[""])

    @classmethod
    def of(cls, lease: Lease, run_id: str) -> Self:
        """The view of a lease."""
        return cls(
            lease_id=lease.lease_id,
            rollout_id=lease.rollout_id,
            group_id=lease.group_id,
            run_id=run_id,
            policy_version=lease.policy_version,
            index=lease.index,
            deadline_s=lease.deadline_s,
            state=lease.state.value,
            reason=lease.reason,
        )


class Leases(BaseModel):
    """Open leases, the oldest first."""

    leases: list[LeaseView] = Field(description="At most 1000.", examples=[[]])
    count: int = Field(description="Open leases in all.", examples=[0])


class TallyView(BaseModel):
    """What was counted in one rollout or step."""

    samples: int = Field(description="Samples that train.", examples=[2])
    tokens: int = Field(description="Tokens of these.", examples=[2048])
    trained_tokens: int = Field(description="Tokens with a loss.", examples=[512])
    routing_positions: int = Field(description="Positions that need a row.", examples=[2047])
    routing_rows: int = Field(description="Positions whose row trains.", examples=[2047])
    mask_positions: int = Field(description="Tokens that need a kept set.", examples=[512])
    mask_rows: int = Field(description="Tokens that have one.", examples=[512])
    samples_with_holes: int = Field(description="Samples with a routing hole.", examples=[0])
    samples_truncated: int = Field(description="Samples cut to seq_len.", examples=[0])
    samples_untrainable: int = Field(description="Samples without loss after it.", examples=[0])
    rows_invalid: int = Field(description="Rows that the engine's writer left out.", examples=[0])

    @classmethod
    def of(cls, tally: Tally) -> Self:
        """The view of a tally."""
        return cls(**{name: getattr(tally, name) for name in Tally.__struct_fields__})


class Receipt(BaseModel):
    """What became of a delivered rollout. The same body gets the same receipt again."""

    rollout_id: str = Field(description="The rollout.", examples=["g7.r0"])
    accepted: bool = Field(description="Whether any of it will train.", examples=[True])
    state: str = Field(
        description="waiting (for its group), ready, packed, trained or dropped.",
        examples=["waiting"],
    )
    samples: int = Field(description="Samples that will train.", examples=[1])
    dropped: dict[str, int] = Field(
        description="What does not train: the rollout, or some of its samples, by reason.",
        examples=[{"no_trainable_tokens": 1}],
    )
    detail: str = Field(description="Why it was dropped, in words.", examples=[""])
    tally: TallyView = Field(description="What was counted in it.")

    @classmethod
    def of(cls, rollout: Rollout) -> Self:
        """The receipt of a recorded rollout."""
        dropped: dict[str, int] = {}
        if rollout.reason is not None:
            dropped[rollout.reason.value] = 1
        elif rollout.tally.samples_untrainable:
            dropped["no_trainable_tokens"] = rollout.tally.samples_untrainable
        return cls(
            rollout_id=rollout.rollout_id,
            accepted=rollout.reason is None,
            state=rollout.state.value,
            samples=rollout.tally.samples if rollout.reason is None else 0,
            dropped=dropped,
            detail=rollout.detail,
            tally=TallyView.of(rollout.tally),
        )


class RolloutView(Receipt):
    """One rollout, and where it is."""

    group_id: str = Field(description="Its group.", examples=["g7"])
    policy_version: int = Field(description="k of its lease.", examples=[3])
    index: int = Field(description="Its place in the order of dispatch.", examples=[41])
    reward: float | None = Field(description="As delivered.", examples=[1.0])
    step: int | None = Field(description="The step that trains on it.", examples=[4])
    files: list[str] = Field(description="Payload files that it keeps.", examples=[[]])

    @classmethod
    def of(cls, rollout: Rollout) -> Self:
        """The view of a rollout."""
        return cls(
            **Receipt.of(rollout).model_dump(),
            group_id=rollout.group_id,
            policy_version=rollout.policy_version,
            index=rollout.index,
            reward=rollout.reward,
            step=rollout.step,
            files=sorted(rollout.files),
        )


class Rollouts(BaseModel):
    """Rollouts, the latest change last."""

    rollouts: list[RolloutView] = Field(description="At most 1000.", examples=[[]])
    count: int = Field(description="Rollouts known in all.", examples=[0])


class StepView(BaseModel):
    """One step."""

    step: int = Field(description="Its number.", examples=[4])
    state: str = Field(
        description="built, shipped (the feed has it), acknowledged (every rank committed it) or "
        "closed (its policy is applied, its files are deleted).",
        examples=["shipped"],
    )
    rollout_ids: list[str] = Field(description="What it trains on.", examples=[["g7.r0"]])
    micro_batches: int = Field(description="Micro batches of each data rank.", examples=[3])
    size_bytes: int = Field(description="Size of the body for the feed.", examples=[65536])
    digest: str = Field(description="sha256 of that body.", examples=["9f86d081884c7d65"])
    files: list[str] = Field(description="Files that it keeps; at most 1000.", examples=[[]])
    file_count: int = Field(description="Files that it keeps.", examples=[0])
    tally: TallyView = Field(description="The sum over its rollouts.")
    routing_valid_fraction: float = Field(description="Of needed routing rows.", examples=[1.0])
    mask_valid_fraction: float = Field(description="Of needed kept sets.", examples=[1.0])

    @classmethod
    def of(cls, record: StepRecord) -> Self:
        """The view of a step."""
        return cls(
            step=record.step,
            state=record.state.value,
            rollout_ids=list(record.rollout_ids),
            micro_batches=record.micro_batches,
            size_bytes=record.size_bytes,
            digest=record.digest,
            files=sorted(record.files)[:1000],
            file_count=len(record.files),
            tally=TallyView.of(record.tally),
            routing_valid_fraction=record.tally.routing_valid_fraction,
            mask_valid_fraction=record.tally.mask_valid_fraction,
        )


class Steps(BaseModel):
    """Steps by number."""

    steps: list[StepView] = Field(description="The last 1000.", examples=[[]])
    next_step: int = Field(description="The step that is collected for.", examples=[5])
