"""Settings of the proxy, read from ``SIDEBAND_PROXY_*``; an unknown key fails at start."""

from collections import Counter
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from services.inference_proxy.dialects.load import NAME_PATTERN
from services.inference_proxy.engine import Role
from services.inference_proxy.headers import is_sendable
from services.inference_proxy.limits import (
    ATTEMPTS_MAX,
    ENGINES_MAX,
    POLICY_VERSION_MAX,
    WORKERS_MAX,
)
from services.inference_proxy.logprob_forms import LogprobForm
from services.kit.settings import ServiceSettings
from sideband.ids import ID_PATTERN


def check_url(url: str) -> str:
    """A plain http(s) base URL without credentials, query or fragment; no trailing slash."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("must be an http or https URL with a host")
    if parts.port == 0:  # reading it raises ValueError beyond 65535
        raise ValueError("must name a port that can be connected to")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("must not carry credentials, a query or a fragment")
    return url.rstrip("/")


class EngineSettings(BaseModel):
    """One engine behind the proxy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=ID_PATTERN, description="Its name in metrics and admin routes.")
    url: str = Field(description="Base URL; the only hosts that the proxy ever contacts.")
    role: Role = Field(default="colocated", description="What it does for a request.")
    dialect: str = Field(
        default="vllm",
        pattern=NAME_PATTERN,
        description="How it is asked and read: vllm, sglang, or the full name of a module.",
    )
    spill: Literal["engine", "proxy"] = Field(
        default="engine",
        description="Who writes payload files: its plugin, or the proxy from its inline answers.",
    )
    payload_mount: str | None = Field(
        default=None, description="Where it mounts the payload root; the proxy's path by default."
    )

    @field_validator("url")
    @classmethod
    def _url(cls, url: str) -> str:
        return check_url(url)

    @field_validator("payload_mount")
    @classmethod
    def _mount(cls, mount: str | None) -> str | None:
        if mount is not None and not mount.startswith("/"):
            raise ValueError("must be an absolute path")
        return mount


class ProxySettings(ServiceSettings):
    """The proxy's engines, payload root, limits and deadlines."""

    model_config = SettingsConfigDict(
        env_prefix="SIDEBAND_PROXY_", frozen=True, extra="forbid", populate_by_name=True
    )

    port: int = Field(default=8100, ge=0, le=65535, description="TCP port; 0 picks a free one.")
    workers: int = Field(
        default=1,
        ge=1,
        le=WORKERS_MAX,
        description="Processes that serve the port together (Linux). Limits are for all of them.",
    )
    engines: tuple[EngineSettings, ...] = Field(
        default=(),
        max_length=ENGINES_MAX,
        description="The engines, as JSON: all colocated, or prefill and decode.",
    )
    engine_token: SecretStr | None = Field(
        default=None, description="Bearer token that the engines ask for."
    )
    payload_root: Path | None = Field(
        default=None, description="The shared payload root; unset means everything inline."
    )
    run_id: str | None = Field(
        default=None, pattern=ID_PATTERN, description="The run; the root's marker says by default."
    )
    model_config_path: Path | None = Field(
        default=None,
        description="The model's config.json; needed by `spill: proxy` and by SGLang engines.",
    )
    spill_threads: int = Field(
        default=16, ge=1, le=256, description="Payload files that are written at the same time."
    )
    spill_bytes_max: int = Field(
        default=2 << 30,
        ge=1 << 20,
        description="Bytes of answers held at the same time to be spilled; more wait unread.",
    )
    routing_encoding: Literal["raw", "packed"] = Field(
        default="raw",
        description="How files that the proxy writes hold routing ids above 256 experts: two bytes "
        "each, or packed to the bits that they need.",
    )
    logprob_form: LogprobForm = Field(
        default="engine",
        description="Of answers: as the engine's, or as vLLM 0.32 (token_ids) or 0.30 "
        "(token_strings) gives it; a client may ask for one by a header.",
    )
    policy_version: int = Field(
        default=0, ge=0, le=POLICY_VERSION_MAX, description="What the engines run at start."
    )
    orchestrator_url: str | None = Field(
        default=None,
        description="Where policy versions are pushed, and the one on record is learnt.",
    )
    orchestrator_token: SecretStr | None = Field(
        default=None, description="Bearer token of the orchestrator."
    )
    attempts_max: int = Field(
        default=3, ge=1, le=ATTEMPTS_MAX, description="Attempts per request, the first included."
    )
    retry_wait_s_max: float = Field(
        default=2.0, ge=0, le=60, description="Longest wait between two attempts."
    )
    request_timeout_s: float = Field(
        default=3600.0, gt=0, description="Deadline of a request over all attempts."
    )
    connect_timeout_s: float = Field(default=5.0, gt=0, description="Deadline to connect.")
    read_timeout_s: float = Field(
        default=1800.0, gt=0, description="Longest silence of an engine within an answer."
    )
    write_timeout_s: float = Field(default=60.0, gt=0, description="Deadline to send a part.")
    pool_timeout_s: float = Field(
        default=30.0, gt=0, description="Longest wait for a free connection."
    )
    connections_max: int = Field(
        default=8192, ge=1, description="Connections to engines, all together."
    )
    probe_interval_s: float = Field(
        default=2.0, gt=0, description="Time between two health probes of an engine."
    )
    probe_timeout_s: float = Field(default=5.0, gt=0, description="Deadline of a health probe.")
    ejection_failures: int = Field(
        default=3, ge=1, description="Failures in a row that eject an engine."
    )
    return_probes: int = Field(
        default=2, ge=1, description="Probes in a row that bring an ejected engine back."
    )
    ejection_backoff_s: float = Field(
        default=5.0, ge=0, description="Least time out; doubles with each ejection in a row."
    )
    ejection_backoff_s_max: float = Field(
        default=120.0, ge=0, description="Longest time out before probes count again."
    )
    delete_grace_s: float = Field(
        default=10.0, ge=0, description="When files of a losing attempt are looked for once more."
    )
    sessions_max: int = Field(
        default=200_000, ge=1, description="Sessions remembered; the least recent go first."
    )
    session_tokens_max: int = Field(
        default=64_000_000, ge=0, description="Tokens remembered over all sessions, 4 bytes each."
    )
    kept_turns_max: int = Field(
        default=100_000,
        ge=0,
        description="Train turns kept for hand-in by request id or session; 0 keeps none.",
    )
    kept_bytes_max: int = Field(
        default=1 << 30, ge=0, description="Bytes of kept turns; the oldest go first."
    )
    kept_age_s_max: float = Field(
        default=7200.0, gt=0, description="How long a turn is kept that nobody hands in."
    )
    weights_timeout_s: float = Field(
        default=600.0, gt=0, description="Deadline of each step of a weight update on an engine."
    )
    push_timeout_s: float = Field(
        default=5.0, gt=0, description="Deadline of one push of a policy version."
    )

    @field_validator("engine_token", "orchestrator_token")
    @classmethod
    def _token(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and not is_sendable(token.get_secret_value()):
            raise ValueError("must be one line of plain characters: it travels in a header")
        return token

    @field_validator("orchestrator_url")
    @classmethod
    def _orchestrator_url(cls, url: str | None) -> str | None:
        return None if url is None else check_url(url)

    @property
    def spills(self) -> bool:
        """Whether the proxy writes files for an engine."""
        return any(engine.spill == "proxy" for engine in self.engines)

    @model_validator(mode="after")
    def _engines_fit(self) -> Self:
        repeated = [name for name, n in Counter(e.name for e in self.engines).items() if n > 1]
        if repeated:
            raise ValueError(f"engines: {repeated[0]} comes twice; names must differ")
        roles = {engine.role for engine in self.engines}
        if "colocated" in roles and len(roles) > 1:
            raise ValueError("engines: colocated engines do not mix with prefill and decode")
        if roles in ({"prefill"}, {"decode"}):
            raise ValueError("engines: prefill and decode come together, one of each at least")
        if self.spills and self.payload_root is not None and self.model_config_path is None:
            raise ValueError("model_config_path: `spill: proxy` needs the model's config.json")
        if self.payload_root is not None and not self.payload_root.is_absolute():
            raise ValueError("payload_root must be an absolute path")
        return self

    def mount_of(self, engine: EngineSettings) -> str | None:
        """Where an engine sees the payload root; None when there is none."""
        if self.payload_root is None:
            return None
        return engine.payload_mount or str(self.payload_root)

    def share(self) -> Self:
        """The settings of one worker: its part of every limit that holds for all together."""
        if self.workers == 1:
            return self
        parts = {
            name: max(least, getattr(self, name) // self.workers) if getattr(self, name) else 0
            for name, least in _SHARED.items()
        }
        return self.model_copy(update=parts)


# Limits over all workers, and the least that a worker needs of each.
_SHARED: Final = {
    "spill_threads": 1,
    "spill_bytes_max": 1 << 20,
    "connections_max": 1,
    "sessions_max": 1,
    "session_tokens_max": 1,
    "kept_turns_max": 1,
    "kept_bytes_max": 1,
}
