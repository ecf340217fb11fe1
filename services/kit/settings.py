"""Settings that every service has. Each service's ``config.py`` subclasses this once.

Read from environment variables with the service's prefix; an unknown variable under the prefix, an
unknown key or a value out of range fails at start. Secrets are ``SecretStr`` and stay hidden.
"""

import ipaddress
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class ServiceSettings(BaseSettings):
    """Listening address, tokens, limits and logging."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port; 0 picks a free one.")
    admin_tokens: tuple[SecretStr, ...] = Field(
        default=(), description="Bearer tokens; needed once the service listens beyond loopback."
    )
    data_tokens: tuple[SecretStr, ...] = Field(
        default=(), description="Bearer tokens that open only what environments use."
    )
    tokens_file: Path | None = Field(
        default=None,
        description='JSON file {"admin": [...], "data": [...]} of further tokens, read again when '
        "it changes. Nobody else may read it (mode 600).",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level that is logged."
    )
    log_format: Literal["json", "console"] = Field(
        default="json", description="One JSON object a line, or colours for people."
    )
    body_bytes_max: int = Field(
        default=64 << 20, ge=1024, le=8 << 30, description="Largest request body in bytes."
    )
    drain_timeout_s: float = Field(
        default=30.0, gt=0, le=3600, description="Longest wait for open requests at shutdown."
    )

    @model_validator(mode="after")
    def _tokens_beyond_loopback(self) -> Self:
        if self.tokens_file is None and not self.admin_tokens:
            if not self.is_loopback:
                raise ValueError(
                    f"admin_tokens is empty: host={self.host} is reachable beyond loopback, "
                    "so at least one token is needed, there or in tokens_file"
                )
            if self.data_tokens:
                raise ValueError("data_tokens is set and admin_tokens is empty: set both or none")
        for name in ("admin_tokens", "data_tokens"):
            if any(len(token.get_secret_value()) < 16 for token in getattr(self, name)):
                raise ValueError(f"{name} has a token under 16 characters: use a longer one")
        return self

    @model_validator(mode="after")
    def _no_unknown_variables(self) -> Self:
        prefix = str(self.model_config.get("env_prefix") or "")
        if prefix:
            known = {f"{prefix}{name}".upper() for name in type(self).model_fields}
            stray = sorted(
                name
                for name in os.environ
                if name.upper().startswith(prefix.upper()) and name.upper() not in known
            )
            if stray:
                raise ValueError(f"unknown variables {', '.join(stray)}: no such setting")
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a host name may resolve to anything
            return False

    def shown(self) -> dict[str, Any]:
        """Effective settings for logs and ``/v1/config``; secrets are stars."""
        return self.model_dump(mode="json")
