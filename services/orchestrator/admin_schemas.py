"""Files, sweeps, policy version and the run as JSON: every field described."""

from typing import Literal, Self

from pydantic import BaseModel, Field

from services.kit.bodies import Closed
from services.orchestrator.book import Book
from services.orchestrator.ending import waiting_for
from services.orchestrator.feed_client import Failure
from services.orchestrator.history import PolicyRecord, ReturnRecord
from services.orchestrator.losses import Report
from services.orchestrator.sweep import VersionPlan


class FileView(BaseModel):
    """Why a payload file is kept."""

    file: str = Field(
        description="Relative to the payload root.",
        examples=["v3/run/a1/g7.r0.t0-0123456789abcdef.sbp"],
    )
    is_kept: bool = Field(description="Whether anything refers to it.", examples=[True])
    is_given_up: bool = Field(description="Whether it was deleted, or will be.", examples=[False])
    kept_by: list[str] = Field(
        description="What refers to it: lease, rollout, group or step.", examples=[["step 4"]]
    )
    size_bytes: int | None = Field(description="On disk; null when gone.", examples=[81920])


class Files(BaseModel):
    """Files that something keeps, by name."""

    files: list[FileView] = Field(description="At most 1000, or the one asked for.", examples=[[]])
    count: int = Field(description="Files kept in all.", examples=[0])


class ResumptionView(BaseModel):
    """What the service found when it last began from its ledger, after a restart or a failure."""

    is_new: bool = Field(description="Whether the run began here.", examples=[False])
    downtime_s: float = Field(description="How long nobody listened.", examples=[4.2])
    files_missing: list[str] = Field(
        description="Files that something still needed and that are gone.", examples=[[]]
    )
    rollouts_dropped: list[str] = Field(
        description="Collected rollouts that were dropped for that.", examples=[[]]
    )
    steps_reduced: list[int] = Field(
        description="Steps that go on without those rollouts.", examples=[[]]
    )
    steps_broken: list[int] = Field(
        description="Steps that ranks may have in part, and may fail to read.", examples=[[]]
    )

    @classmethod
    def of(cls, report: Report | None) -> Self:
        """The view of a report."""
        found = report or Report()
        return cls(
            is_new=report is None,
            downtime_s=found.downtime_s,
            files_missing=found.files_missing,
            rollouts_dropped=[str(name) for name in found.rollouts_dropped],
            steps_reduced=found.steps_reduced,
            steps_broken=found.steps_broken,
        )


class SweptVersion(BaseModel):
    """What a sweep does with one orphaned policy version."""

    policy_version: int = Field(description="k of the folder.", examples=[1])
    is_whole: bool = Field(description="Whether the whole folder goes.", examples=[True])
    file_count: int = Field(description="Files that go.", examples=[12])
    size_bytes: int = Field(description="Bytes that go.", examples=[983040])
    kept_count: int = Field(description="Files that something still keeps.", examples=[0])
    files: list[str] = Field(description="The files that go; at most 1000.", examples=[[]])

    @classmethod
    def of(cls, plan: VersionPlan) -> Self:
        """The view of a plan."""
        return cls(
            policy_version=plan.policy_version,
            is_whole=plan.is_whole,
            file_count=len(plan.files),
            size_bytes=plan.size_bytes,
            kept_count=plan.kept_count,
            files=list(plan.files[:1000]),
        )


class Sweep(BaseModel):
    """What a sweep did, or would do."""

    dry_run: bool = Field(description="Whether nothing was deleted.", examples=[True])
    keep_from: int = Field(description="Versions from here on stay.", examples=[2])
    versions: list[SweptVersion] = Field(description="Orphaned versions.", examples=[[]])


class PolicyBody(Closed):
    """What every serving engine has applied."""

    policy_version: int = Field(
        ge=0, le=999_999_999, description="The least over the serving engines.", examples=[4]
    )
    lineage: int | None = Field(
        default=None,
        ge=0,
        le=(1 << 31) - 1,
        description="The weights are of this lineage of the run, for sure. Needed only where the "
        "trainer went back and no older version than before will be seen.",
        examples=[1],
    )


class PolicyView(BaseModel):
    """The policy version as the orchestrator knows it."""

    policy_version: int | None = Field(
        description="The least over the serving engines; null: not known yet.", examples=[4]
    )
    highest_applied: int = Field(
        description="The highest that was ever applied everywhere.", examples=[4]
    )


class PastPolicy(BaseModel):
    """A policy version, from when all serving engines had it."""

    number: int = Field(description="Counts the changes from 0.", examples=[4])
    policy_version: int = Field(
        description="The least over the serving engines: v(s) is what step s yielded.", examples=[4]
    )
    lineage: int = Field(
        description="How often the trainer had gone back: the same version of another lineage is "
        "of other weights.",
        examples=[0],
    )
    applied_s: float = Field(description="Since when, Unix time.", examples=[1767225600.0])
    trained_s: float | None = Field(
        description="When every rank had committed the step that yielded it; null for v0, and "
        "where that was not known.",
        examples=[1767225590.0],
    )
    source: Literal["push", "poll", "setting"] = Field(
        description="Who said so: a push, the answer to a question to the proxy, the settings.",
        examples=["push"],
    )

    @classmethod
    def of(cls, record: PolicyRecord) -> Self:
        """The view of a record."""
        return cls.model_validate(record, from_attributes=True)


class Policies(BaseModel):
    """Policy versions that were served, the latest last."""

    policy_versions: list[PastPolicy] = Field(description="Each of them.", examples=[[]])


class DrainBody(Closed):
    """How long a drain may take, from now."""

    leases_s: float | None = Field(
        default=None, ge=0, description="Then open leases are cancelled.", examples=[60.0]
    )
    deadline_s: float | None = Field(
        default=None, gt=0, description="Then the run ends, whatever is missing.", examples=[600.0]
    )


class GoBackBody(Closed):
    """The checkpoint from which the trainer restarts."""

    step: int = Field(ge=0, le=(1 << 31) - 1, description="Its step.", examples=[10])
    lineage: int | None = Field(
        default=None,
        ge=1,
        le=(1 << 31) - 1,
        description="One more than the run's lineage: then a repeat of the request changes "
        "nothing. Without it every request goes back.",
        examples=[1],
    )


class ReturnView(BaseModel):
    """What the trainer gets again, and everything that it does not."""

    lineage: int = Field(description="How often the trainer went back, then.", examples=[1])
    step: int = Field(description="The checkpoint's step: the next is after it.", examples=[10])
    returned_s: float = Field(description="When, Unix time.", examples=[1767225600.0])
    last_step: int = Field(description="The last step that was built before.", examples=[15])
    steps_again: list[int] = Field(
        description="Steps that come again with the same bytes.", examples=[[11, 12]]
    )
    steps_reduced: list[int] = Field(
        description="Steps that come again without the rollouts that are dropped.", examples=[[]]
    )
    steps_moved: list[int] = Field(
        description="Steps behind a gap: their rollouts are packed again, in the same order, from "
        "the gap's number on.",
        examples=[[]],
    )
    steps_gone: list[int] = Field(
        description="Steps of which nothing is left. Their numbers are used again.", examples=[[]]
    )
    rollouts_dropped: list[str] = Field(
        description="Rollouts that are not trained again.", examples=[[]]
    )
    files_missing: list[str] = Field(
        description="Files that were looked for and are gone.", examples=[[]]
    )
    start_id: str | None = Field(
        description="The start that went back by its settings; null: a request did.",
        examples=[None],
    )

    @classmethod
    def of(cls, record: ReturnRecord) -> Self:
        """The view of a record."""
        return cls.model_validate(record, from_attributes=True)


class WentBackView(ReturnView):
    """What the trainer gets again, and whether its new processes may be started."""

    is_feed_told: bool = Field(
        description="Whether the feed has confirmed it; false when it did not answer in time. It "
        "is told as soon as it is there, and a repeat of the request tries again. A process that "
        "joins before may be ended with those of before.",
        examples=[True],
    )


class Returns(BaseModel):
    """Times that the trainer went back, the latest last."""

    returns: list[ReturnView] = Field(description="Each of them.", examples=[[]])


class RunView(BaseModel):
    """The run at a glance."""

    run_id: str = Field(description="The run.", examples=["run"])
    phase: Literal["running", "paused", "draining", "ended", "stopped"] = Field(
        description="ended and stopped are terminal.", examples=["running"]
    )
    reason: str = Field(
        description="Why it ended or stopped, or what it was reopened after.", examples=[""]
    )
    waiting_for: str = Field(description="What an end would wait for.", examples=["nothing"])
    lineage: int = Field(
        description="How often the trainer went back to an earlier checkpoint.", examples=[0]
    )
    next_step: int = Field(description="The step that is collected for.", examples=[5])
    policy_version: int | None = Field(description="As applied everywhere.", examples=[4])
    leases_open: int = Field(description="Open leases.", examples=[64])
    groups_open: int = Field(description="Groups that are not complete.", examples=[8])
    rollouts_held: int = Field(description="Rollouts that wait for a step.", examples=[12])
    files_kept: int = Field(description="Files that something keeps.", examples=[210])
    feed_failure: str | None = Field(
        description="A step that failed on the ranks, until all of them have come back.",
        examples=["step 4, rank 3: rows could not be read"],
    )

    @classmethod
    def of(cls, book: Book, failure: Failure | None) -> Self:
        """The view of a book and of what the feed said last."""
        return cls(
            run_id=book.rules.run_id,
            phase=book.run.phase.value,
            reason=book.run.reason,
            waiting_for=waiting_for(book),
            lineage=book.lineage,
            next_step=book.next_step,
            policy_version=book.policy_version,
            leases_open=len(book.open_leases),
            groups_open=len(book.groups),
            rollouts_held=len(book.held),
            files_kept=book.retention.held_count,
            feed_failure=None
            if failure is None
            else f"step {failure.step}, rank {failure.global_rank}: {failure.reason}",
        )
