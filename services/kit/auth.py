"""Bearer tokens, asked for on every route but health, readiness, version and metrics.

Admin tokens open every route, data tokens only those that environments use. Both may lie in a file
that is read again when it changes, so that tokens are rotated without a restart: add the new one,
move the clients over, take the old one out.
"""

import asyncio
import hmac
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import structlog
from fastapi import Request
from pydantic import SecretStr

from services.kit.problems import Forbidden, Unauthorized

TOKEN_LENGTH_MIN: Final = 16
FILE_BYTES_MAX: Final = 64 << 10
RELOAD_S: Final = 1.0  # a rotated token is known this soon

Scope = Literal["admin", "data"]
Token = Annotated[str, msgspec.Meta(min_length=TOKEN_LENGTH_MIN, max_length=512)]
log = structlog.get_logger(__name__)


class TokenFileUnusable(ValueError):
    """The file of tokens cannot be used; ``reason`` holds no part of its content."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"tokens_file {path}: {reason}")


class TokenFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file holds: ``{"admin": ["…"], "data": ["…"]}``."""

    admin: tuple[Token, ...] = ()
    data: tuple[Token, ...] = ()


class Tokens:
    """The tokens that are valid now. Compares in constant time against each one."""

    def __init__(
        self,
        *,
        admin: Sequence[SecretStr] = (),
        data: Sequence[SecretStr] = (),
        file: Path | None = None,
    ) -> None:
        self._fixed = {
            "admin": [token.get_secret_value().encode() for token in admin],
            "data": [token.get_secret_value().encode() for token in data],
        }
        self._file = file
        self._seen: tuple[int, int, int] | None = None
        self._valid = self._fixed

    @property
    def is_in_file(self) -> bool:
        """Whether there is a file to watch."""
        return self._file is not None

    @property
    def are_asked_for(self) -> bool:
        """A service without any token is open: its settings allow that on loopback only."""
        return self._file is not None or any(self._fixed.values())

    def allows(self, authorization: str, scope: Scope) -> bool:
        """Whether the header's value carries a token for ``scope``, or none are asked for."""
        return not self.are_asked_for or scope in self.scopes(authorization)

    def scopes(self, authorization: str) -> set[Scope]:
        """What the header's value opens."""
        scheme, _, given = authorization.partition(" ")
        token = given.strip().encode()
        # Every token is compared, so that timing says nothing about which one is near.
        matches: dict[str, list[bool]] = {
            kind: [hmac.compare_digest(token, valid) for valid in self._valid[kind]]
            for kind in ("admin", "data")
        }
        if scheme.lower() != "bearer":
            return set()
        if any(matches["admin"]):
            return {"admin", "data"}
        return {"data"} if any(matches["data"]) else set()

    def reload(self) -> bool:
        """Read the file if it changed; whether it did. Blocking.

        Raises TokenFileUnusable; the tokens stay what they were.
        """
        if self._file is None:
            return False
        try:
            status = self._file.stat()
        except OSError as exc:
            raise TokenFileUnusable(self._file, exc.strerror or "cannot be read") from exc
        seen = (status.st_mtime_ns, status.st_ino, status.st_size)
        if seen == self._seen:
            return False
        found = _read(self._file, status)
        self._valid = {
            "admin": self._fixed["admin"] + [token.encode() for token in found.admin],
            "data": self._fixed["data"] + [token.encode() for token in found.data],
        }
        self._seen = seen
        return True

    async def watch(self) -> None:
        """Until cancelled: new tokens are known within ``RELOAD_S``. A bad file changes nothing."""
        complaint = ""
        while True:
            await asyncio.sleep(RELOAD_S)
            try:
                if await asyncio.to_thread(self.reload):
                    log.info("tokens_reloaded", file=str(self._file))
                complaint = ""
            except TokenFileUnusable as exc:
                if exc.reason != complaint:
                    log.error("tokens_file_unusable", file=str(exc.path), reason=exc.reason)
                complaint = exc.reason


def _read(path: Path, status: os.stat_result) -> TokenFile:
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise TokenFileUnusable(path, "others may read it: chmod 600")
    if status.st_size > FILE_BYTES_MAX:
        raise TokenFileUnusable(path, f"is over {FILE_BYTES_MAX} bytes")
    try:
        found = msgspec.json.decode(path.read_bytes(), type=TokenFile)
    except OSError as exc:
        raise TokenFileUnusable(path, exc.strerror or "cannot be read") from exc
    except msgspec.MsgspecError as exc:  # its message may quote a key, never a value
        rule = f"admin and data: lists of tokens of {TOKEN_LENGTH_MIN} characters or more"
        raise TokenFileUnusable(path, f"is not JSON with {rule}") from exc
    if not found.admin:
        raise TokenFileUnusable(path, "has no admin token: nobody could administer the service")
    return found


class TokenCheck:
    """A FastAPI dependency: only requests with a token for ``scope`` go on."""

    def __init__(self, tokens: Tokens, scope: Scope) -> None:
        self._tokens, self._scope = tokens, scope

    async def __call__(self, request: Request) -> None:
        """Raises Unauthorized without a valid token, Forbidden with one of another scope."""
        given = request.headers.get("authorization", "")
        if self.allows(given):
            return
        if self._tokens.scopes(given):
            raise Forbidden("This route needs an admin token; a data token was given.")
        raise Unauthorized(
            "A bearer token of this service is needed.", headers={"WWW-Authenticate": "Bearer"}
        )

    def allows(self, authorization: str) -> bool:
        """Whether the header's value carries a token for the scope, or none are asked for."""
        return self._tokens.allows(authorization, self._scope)
