"""Settings of the orchestrator, read from ``SIDEBAND_ORCHESTRATOR_*``; unknown keys fail."""

import os
import socket
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from services.kit.settings import ServiceSettings
from services.orchestrator.membership import StepSize
from services.orchestrator.quota import Quota
from services.orchestrator.rules import Rules
from services.orchestrator.storage.opening import MEMORY, LedgerPlace, url_problem
from sideband.batch.packing import PackingPlan
from sideband.errors import InvalidInput
from sideband.feed.limits import STEP_MAX
from sideband.ids import ID_PATTERN, RunId

LEDGER_NAME: Final = "ledger.sqlite3"  # in the payload root, beside the folders of versions


class OrchestratorSettings(ServiceSettings):
    """One run: its model, its steps, its files, its deadlines."""

    model_config = SettingsConfigDict(
        env_prefix="SIDEBAND_ORCHESTRATOR_", frozen=True, extra="forbid"
    )

    port: int = Field(default=8200, ge=0, le=65535, description="TCP port; 0 picks a free one.")
    body_bytes_max: int = Field(
        default=256 << 20, ge=1024, le=8 << 30, description="Largest request body in bytes."
    )
    run_id: str = Field(default="run", pattern=ID_PATTERN, description="The run that is served.")
    payload_root: Path | None = Field(
        default=None, description="The shared payload root; unset means everything inline."
    )
    start: Literal["fresh", "resume"] = Field(
        default="resume",
        description="fresh wipes a marked root and begins; resume keeps it. A run that has work "
        "and has not ended is wiped only by a new start_id.",
    )
    start_id: str | None = Field(
        default=None,
        pattern=ID_PATTERN,
        description="Names this start, best by what is new when a run is meant to be: a job's id. "
        "A fresh start with the id that began the run goes on with it, as a supervisor wants.",
    )
    resume_from_step: int | None = Field(
        default=None,
        ge=0,
        le=STEP_MAX,
        description="The trainer restarts from the checkpoint of this step: the run goes back to "
        "it, once for each start_id, which must be new whenever the trainer restarts.",
    )
    ledger_url: SecretStr | None = Field(
        default=None,
        description="memory, sqlite:///<absolute path> or postgresql://<address>. Unset: "
        "ledger.sqlite3 in the payload root, memory without a root.",
    )
    instance_name: str | None = Field(
        default=None,
        max_length=256,
        description="How this process is named to clients of others on the same ledger, best its "
        "URL; unset: host name and process id.",
    )
    ledger_lease_s: float = Field(
        default=5.0, ge=0.5, le=60, description="PostgreSQL: a silent leader is replaced after it."
    )
    ledger_commit_timeout_s: float = Field(
        default=10.0, gt=0, le=600, description="A commit that takes longer has failed."
    )
    applied_steps_kept: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="Steps whose files and samples are kept although their policy is applied, for "
        "a trainer that goes back to an earlier checkpoint. Costs the bytes of as many steps.",
    )
    model_config_path: Path | None = Field(
        default=None, description="The model's Hugging Face config.json; needed for any rows."
    )
    feed_url: str | None = Field(default=None, description="Base URL of the trainer feed.")
    feed_token: SecretStr | None = Field(default=None, description="Bearer token of the feed.")
    proxy_url: str | None = Field(
        default=None, description="Base URL of the inference proxy; unset: versions come by push."
    )
    proxy_token: SecretStr | None = Field(default=None, description="Bearer token of the proxy.")

    dp_size: int = Field(default=1, ge=1, le=4096, description="Data-parallel ranks.")
    cp_size: int = Field(default=1, ge=1, le=1024, description="Context-parallel ranks.")
    layout: Literal["contiguous", "zigzag"] = Field(
        default="contiguous", description="How a packed row is cut over context-parallel ranks."
    )
    seq_len: int = Field(
        default=32768, ge=1, le=1 << 24, description="Tokens of a packed row; samples are cut."
    )
    pad_multiple: int = Field(
        default=1, ge=1, le=1 << 16, description="Rows are padded to a multiple of this as well."
    )
    step_rollouts: int = Field(default=128, ge=1, description="Rollouts of one step.")
    step_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of one step; replaces step_rollouts when set."
    )
    first_step: int = Field(default=1, ge=1, description="Number of the first step.")
    initial_policy_version: int | None = Field(
        default=None, ge=0, description="Taken as applied until a proxy tells; unset: wait for it."
    )
    max_off_policy_steps: int = Field(
        default=8, ge=0, description="Steps that a rollout may be behind the policy it trains."
    )
    deterministic: bool = Field(
        default=False, description="Steps follow dispatch order instead of arrival."
    )
    filter_zero_advantage: bool = Field(
        default=False, description="Drop groups whose rewards are all equal."
    )
    ship_last_partial_step: bool = Field(
        default=True, description="A drain ships what does not fill a step; else it is dropped."
    )
    steps_ahead_max: int = Field(
        default=2, ge=1, le=1024, description="Steps built and not yet committed by every rank."
    )

    keep_rows_around_holes: bool = Field(
        default=False, description="Keep a sample's routing beside a hole instead of dropping it."
    )
    strict_masks: bool = Field(
        default=False, description="Refuse a rollout that lacks a mask where sampling truncates."
    )
    routing_valid_fraction_min: float = Field(
        default=0.0, ge=0, le=1, description="A step with fewer valid routing rows stops the run."
    )
    mask_valid_fraction_min: float = Field(
        default=0.0, ge=0, le=1, description="A step with fewer masks than needed stops the run."
    )
    check_files: bool = Field(
        default=True, description="Compare segments with their file's header at intake."
    )
    file_wait_s: float = Field(
        default=10.0, ge=0, le=600, description="How long a payload file may stay invisible."
    )

    lease_timeout_s: float = Field(
        default=3600.0, gt=0, description="A lease ends after this unless it is renewed."
    )
    group_timeout_s: float = Field(
        default=600.0, gt=0, description="An incomplete group that nobody works on is closed."
    )
    policy_timeout_s: float = Field(
        default=3600.0, gt=0, description="A committed step's policy must be applied by then."
    )
    drain_leases_s: float = Field(
        default=600.0, ge=0, description="A drain cancels open leases after this."
    )
    drain_deadline_s: float = Field(
        default=1800.0, gt=0, description="A drain ends after this, whatever is missing."
    )
    leases_open_max: int = Field(default=20_000, ge=1, description="Open leases at a time.")
    rollouts_held_max: int = Field(
        default=100_000, ge=1, description="Rollouts that wait for a step; more is a 503."
    )
    history_max: int = Field(
        default=100_000, ge=1, description="Ended leases and rollouts still known by id."
    )

    tick_s: float = Field(default=1.0, gt=0, le=60, description="Period of deadlines.")
    feed_poll_s: float = Field(
        default=0.5, gt=0, le=60, description="Period of asking the feed for acknowledgements."
    )
    proxy_poll_s: float = Field(
        default=2.0, gt=0, le=600, description="Period of asking the proxy for its version."
    )
    sweep_s: float = Field(
        default=300.0, gt=0, description="Period of the orphan sweep of the payload root."
    )
    storage_poll_s: float = Field(
        default=5.0, gt=0, le=600, description="Period of looking at the payload root's space."
    )
    payload_free_bytes_min: int = Field(
        default=1 << 30, ge=0, description="With less free space leases and rollouts get a 503."
    )
    payload_bytes_max: int | None = Field(
        default=None,
        ge=1,
        description="With more bytes of payload files they do, too; every file is looked at.",
    )
    deletes_per_s: float = Field(
        default=2000.0, gt=0, le=1e6, description="Payload files deleted per second at most."
    )
    http_timeout_s: float = Field(default=30.0, gt=0, description="Deadline of a call.")

    @field_validator("ledger_url")
    @classmethod
    def _ledger_url(cls, url: SecretStr | None) -> SecretStr | None:
        problem = None if url is None else url_problem(url.get_secret_value())
        if problem is not None:
            raise ValueError(problem)
        return url

    @field_validator("feed_url", "proxy_url")
    @classmethod
    def _base_url(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("must be an http or https URL")
        return url.rstrip("/") if url else None

    @model_validator(mode="after")
    def _goes_back_once(self) -> Self:
        if self.resume_from_step is None:
            return self
        if self.start != "resume":
            raise ValueError("resume_from_step: a fresh start has no step to resume from")
        if self.start_id is None:
            raise ValueError("resume_from_step: needs a start_id, or each restart would go back")
        return self

    @model_validator(mode="after")
    def _plan_fits(self) -> Self:
        try:
            self.packing_plan()
        except InvalidInput as exc:
            raise ValueError(str(exc)) from exc
        if self.payload_root is not None and not self.payload_root.is_absolute():
            raise ValueError("payload_root must be an absolute path")
        return self

    def packing_plan(self) -> PackingPlan:
        """How steps are packed. Raises InvalidInput."""
        return PackingPlan(
            seq_len=self.seq_len,
            dp_size=self.dp_size,
            cp_size=self.cp_size,
            layout=self.layout,
            pad_multiple=self.pad_multiple,
        )

    def ledger_place(self) -> LedgerPlace:
        """Where the ledger is, and as whom it is opened."""
        if self.ledger_url is not None:
            url = self.ledger_url.get_secret_value()
        elif self.payload_root is not None:
            url = f"sqlite:///{self.payload_root / LEDGER_NAME}"
        else:
            url = MEMORY
        return LedgerPlace(
            url=url,
            run_id=self.run_id,
            name=self.instance_name or f"{socket.gethostname()}:{os.getpid()}",
            lease_s=self.ledger_lease_s,
            start_id=self.start_id,
        )

    def quota(self) -> Quota:
        """How full the payload root may become."""
        return Quota(
            free_bytes_min=self.payload_free_bytes_min, used_bytes_max=self.payload_bytes_max
        )

    @property
    def is_ledger_in_root(self) -> bool:
        """Whether the ledger is the default one of a run with a payload root."""
        return self.ledger_url is None and self.payload_root is not None

    def rules(self) -> Rules:
        """What the decisions go by."""
        return Rules(
            run_id=RunId(self.run_id),
            step_size=StepSize(rollouts=self.step_rollouts, tokens=self.step_tokens),
            max_off_policy_steps=self.max_off_policy_steps,
            is_deterministic=self.deterministic,
            filter_zero_advantage=self.filter_zero_advantage,
            ship_last_partial_step=self.ship_last_partial_step,
            first_step=self.first_step,
            lease_timeout_s=self.lease_timeout_s,
            group_timeout_s=self.group_timeout_s,
            policy_timeout_s=self.policy_timeout_s,
            leases_open_max=self.leases_open_max,
            rollouts_held_max=self.rollouts_held_max,
            steps_ahead_max=self.steps_ahead_max,
            history_max=self.history_max,
            steps_kept=self.applied_steps_kept,
        )
