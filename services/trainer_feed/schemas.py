"""What the feed's routes say, for people and generated clients."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from services.kit.bodies import Closed
from sideband.feed.ancestry import RETURNS_MAX
from sideband.feed.facts import GoneBack
from sideband.feed.limits import STEP_MAX

FeedState = Literal["waiting_for_ranks", "streaming", "paused", "failed", "ending", "drained"]
FeedInstance = Annotated[
    str,
    Field(
        description="The feed's process: another one means that it was started anew and has "
        "forgotten what it held. A new one too when the trainer went back.",
        examples=["5f2b1c"],
    ),
]
Lineage = Annotated[
    int, Field(description="How often the trainer went back, as told.", examples=[0])
]


class StepReceipt(BaseModel):
    """The feed holds the step until every rank has committed it."""

    step: int = Field(description="The step.", examples=[12])
    digest: str = Field(description="sha256 of the body.", examples=["9f86d081884c7d65"])
    micro_batch_count: int = Field(description="Micro batches of each data rank.", examples=[8])
    is_new: bool = Field(description="False for a repeat of what was taken.", examples=[True])
    feed_instance: FeedInstance


class StepView(BaseModel):
    """A held step and who has not committed it."""

    step: int = Field(description="The step.", examples=[12])
    micro_batch_count: int = Field(description="Micro batches of each data rank.", examples=[8])
    digest: str = Field(description="sha256 of the body.", examples=["9f86d081884c7d65"])
    uncommitted_ranks: list[int] = Field(
        description="Global ranks that have not committed it, at most 1024.", examples=[[3]]
    )


class StepsView(BaseModel):
    """Held steps, ascending."""

    steps: list[StepView] = Field(description="Each held step.", examples=[[]])
    last_step: int | None = Field(description="The last step taken.", examples=[12])
    steps_held_max: int = Field(description="As many are held at most.", examples=[4])
    feed_instance: FeedInstance
    lineage: Lineage


class EarlierReturn(Closed):
    """The trainer went back before, to an earlier step than it did since."""

    lineage: int = Field(ge=1, le=STEP_MAX, description="That began then.", examples=[1])
    step: int = Field(ge=0, le=STEP_MAX, description="To which it went back.", examples=[4])


class GoBackBody(Closed):
    """The trainer went back to an earlier checkpoint."""

    lineage: int = Field(ge=1, le=STEP_MAX, description="How often it did, now.", examples=[1])
    step: int = Field(ge=0, le=STEP_MAX, description="Its checkpoint's step.", examples=[10])
    last_step: int = Field(
        ge=0,
        le=STEP_MAX,
        description="The last step that was built: a feed that was started anew takes no commit "
        "of a later one.",
        examples=[15],
    )
    earlier: list[EarlierReturn] = Field(
        default=[],
        max_length=RETURNS_MAX,
        description="Times before that still bound which checkpoints are of the run, ascending in "
        "lineage and step; those to a step that is not before a later one's need not be named.",
        examples=[[{"lineage": 1, "step": 4}]],
    )

    @model_validator(mode="after")
    def _forward(self) -> Self:
        if self.last_step < self.step:
            raise ValueError("last_step must not lie before step")
        line = [*((one.lineage, one.step) for one in self.earlier), (self.lineage, self.step)]
        if any(a[0] >= b[0] or a[1] >= b[1] for a, b in pairwise(line)):
            raise ValueError("earlier must ascend to lineage and step, in both")
        return self

    def to_domain(self) -> GoneBack:
        """As the library has it."""
        return GoneBack(
            lineage=self.lineage,
            step=self.step,
            last_step=self.last_step,
            earlier=tuple((one.lineage, one.step) for one in self.earlier),
        )


class WentBack(BaseModel):
    """From where the steps come again."""

    lineage: Lineage
    step: int = Field(description="The next step is the one after it.", examples=[10])
    steps_dropped: list[int] = Field(
        description="Steps that were held and are not any more: to be sent again.",
        examples=[[11, 12]],
    )
    feed_instance: FeedInstance


class RankView(BaseModel):
    """One global rank."""

    global_rank: int = Field(description="The trainer process.", examples=[3])
    is_connected: bool = Field(description="Whether it is there now.", examples=[True])
    dp_rank: int | None = Field(description="Its data rank; none before a hello.", examples=[1])
    cp_rank: int | None = Field(description="Its context-parallel rank.", examples=[1])
    instance: str | None = Field(description="Which process it is.", examples=["1f0c"])
    seen_s_ago: float | None = Field(description="Since its last message.", examples=[0.4])
    delivered: tuple[int, int] | None = Field(
        description="The place (step, index) that is sent to it next.", examples=[[12, 3]]
    )
    read: tuple[int, int] | None = Field(
        description="The place before which it has read all its rows.", examples=[[12, 2]]
    )
    credit_left: int | None = Field(description="Micro batches that may be sent now.", examples=[2])
    committed_step: int | None = Field(description="Its last commit.", examples=[11])


class RanksView(BaseModel):
    """All global ranks, absent ones too."""

    ranks: list[RankView] = Field(description="By global rank.", examples=[[]])
    expected: int = Field(description="Ranks that the barrier waits for.", examples=[4])
    waiting_for: list[int] = Field(
        description="Ranks that hold the others up, at most 1024.", examples=[[3]]
    )
    generation: int = Field(
        description="Grows with each failed step, and when the trainer goes back.", examples=[1]
    )


class FailureView(BaseModel):
    """Why the ranks gave up; stands until all of them have come back."""

    step: int = Field(description="The failed step.", examples=[12])
    global_rank: int = Field(description="Who failed it.", examples=[3])
    reason: str = Field(description="What it said.", examples=["rows could not be read"])


class RankCommit(BaseModel):
    """What one rank has committed."""

    global_rank: int = Field(description="The trainer process.", examples=[3])
    committed_step: int = Field(description="Its last commit.", examples=[11])


class Acknowledgements(BaseModel):
    """What all ranks have committed: files of these steps are no longer read."""

    run_id: str = Field(description="The run.", examples=["run-2026-01"])
    committed_step: int | None = Field(
        description="Every global rank has committed it; none before the first step.",
        examples=[11],
    )
    last_step: int | None = Field(description="The last step taken.", examples=[12])
    ranks: list[RankCommit] = Field(description="Each rank that has committed.", examples=[[]])
    failed: FailureView | None = Field(description="A failed step, if any.", examples=[None])
    feed_instance: FeedInstance
    lineage: Lineage


class FeedView(BaseModel):
    """Where the feed stands."""

    state: FeedState = Field(description="What it does.", examples=["streaming"])
    steps_held: list[int] = Field(description="Steps not committed by all.", examples=[[12]])
    waiting_for: list[int] = Field(
        description="Ranks that hold the others up, at most 1024.", examples=[[]]
    )
    is_complete: bool = Field(
        description="After a drain: whether everything was committed in time.", examples=[True]
    )
