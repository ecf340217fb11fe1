"""Settings of the feed, read from ``SIDEBAND_FEED_*``; an unknown key fails at start."""

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from services.kit.settings import ServiceSettings
from sideband.batch.types import Layout
from sideband.errors import InvalidId, InvalidInput
from sideband.feed.curve import check_guarded
from sideband.feed.facts import FeedPlan
from sideband.feed.keys import FeedKeys
from sideband.feed.limits import (
    CP_SIZE_MAX,
    DP_SIZE_MAX,
    RANKS_MAX,
    STEP_BODY_BYTES_MAX,
    STEPS_HELD_MAX,
)
from sideband.ids import ID_PATTERN, RunId, check_id


class FeedSettings(ServiceSettings):
    """The run that is fed, its grid of ranks, and how much is held."""

    model_config = SettingsConfigDict(env_prefix="SIDEBAND_FEED_", frozen=True, extra="forbid")

    port: int = Field(default=8300, ge=0, le=65535, description="TCP port; 0 picks a free one.")
    body_bytes_max: int = Field(
        default=STEP_BODY_BYTES_MAX,
        ge=1024,
        le=STEP_BODY_BYTES_MAX,
        description="Largest step body in bytes; inline rows make it large.",
    )
    run_id: str = Field(
        pattern=ID_PATTERN, description="The run. Steps and ranks of another are refused."
    )
    endpoint: str = Field(
        default="tcp://127.0.0.1:5600",
        description="ZMQ address that ranks connect to: tcp://host:port or ipc://path.",
    )
    curve_key_file: Path | None = Field(
        default=None,
        description="The feed's secret key, as `sideband keys` makes it (mode 600). With it only "
        "ranks that hold a key get in; needed for an endpoint beyond loopback.",
    )
    curve_ranks_dir: Path | None = Field(
        default=None,
        description="Folder of the public keys of ranks that may connect, read again when it "
        "changes.",
    )
    plain_beyond_loopback: bool = Field(
        default=False,
        description="Serve an endpoint beyond loopback without keys, to whoever reaches it.",
    )
    dp_size: int = Field(default=1, ge=1, le=DP_SIZE_MAX, description="Data ranks.")
    cp_size: int = Field(
        default=1, ge=1, le=CP_SIZE_MAX, description="Context-parallel ranks of each data rank."
    )
    layout: Layout = Field(
        default="contiguous", description="How context parallelism cuts a packed row."
    )
    rank_count: int | None = Field(
        default=None,
        ge=1,
        le=RANKS_MAX,
        description="Trainer processes in all, with tensor and pipeline siblings; "
        "dp_size × cp_size by default. Nothing is sent before all of them are there.",
    )
    steps_held_max: int = Field(
        default=4,
        ge=1,
        le=STEPS_HELD_MAX,
        description="Steps held until every rank has committed them; then a PUT gets a 503.",
    )
    peer_timeout_s: float = Field(
        default=10.0, ge=1.5, le=3600, description="Silence after which a rank counts as lost."
    )
    rank_lost_fails_after_s: float | None = Field(
        default=None,
        gt=0,
        description="Absence after which a lost rank fails its step on all ranks; "
        "unset, it is only named.",
    )

    @field_validator("run_id")
    @classmethod
    def _run_id(cls, run_id: str) -> str:
        try:
            return check_id("run_id", run_id)
        except InvalidId as exc:
            raise ValueError(str(exc)) from exc

    @field_validator("endpoint")
    @classmethod
    def _endpoint(cls, endpoint: str) -> str:
        if not endpoint.startswith(("tcp://", "ipc://")):
            raise ValueError("must begin with tcp:// or ipc://")
        return endpoint

    @model_validator(mode="after")
    def _ranks_fill_the_grid(self) -> Self:
        grid = self.dp_size * self.cp_size
        if self.ranks % grid:
            raise ValueError(f"rank_count is {self.ranks}: must be a multiple of {grid}, the grid")
        if (self.rank_lost_fails_after_s or self.peer_timeout_s) < self.peer_timeout_s:
            raise ValueError("rank_lost_fails_after_s must not be shorter than peer_timeout_s")
        return self

    @model_validator(mode="after")
    def _keys_beyond_loopback(self) -> Self:
        if (self.curve_key_file is None) != (self.curve_ranks_dir is None):
            raise ValueError("curve_key_file and curve_ranks_dir come together")
        try:
            check_guarded(
                self.endpoint,
                has_keys=self.curve_key_file is not None,
                plain_beyond_loopback=self.plain_beyond_loopback,
            )
        except InvalidInput as exc:
            raise ValueError(str(exc)) from exc
        return self

    def keys(self) -> FeedKeys | None:
        """Where the keys lie; None: whoever reaches the endpoint is served."""
        if self.curve_key_file is None or self.curve_ranks_dir is None:
            return None
        return FeedKeys(feed_key=self.curve_key_file, ranks_dir=self.curve_ranks_dir)

    @property
    def ranks(self) -> int:
        """Trainer processes in all."""
        return self.rank_count or self.dp_size * self.cp_size

    def plan(self) -> FeedPlan:
        """What the delivery machine serves."""
        return FeedPlan(
            run_id=RunId(self.run_id),
            rank_count=self.ranks,
            dp_size=self.dp_size,
            cp_size=self.cp_size,
            layout=self.layout,
            steps_held_max=self.steps_held_max,
            peer_timeout_s=self.peer_timeout_s,
            rank_lost_fails_after_s=self.rank_lost_fails_after_s,
        )
