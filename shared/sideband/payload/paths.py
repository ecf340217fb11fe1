"""Names of payload files below the root, and back.

A file is ``v<k>/<run id>/<hh>/<request id>-<16 hex>.sbp``; while it is written it is called
``.<name>.staging`` in the same folder. ``hh`` spreads requests over 256 folders.
"""

import re
import secrets
from dataclasses import dataclass
from typing import Final

import xxhash

from sideband.errors import InvalidId
from sideband.ids import RequestId, RunId, check_id
from sideband.payload.errors import OtherRunPayload, PathEscapesRoot

POLICY_VERSION_MAX: Final = 999_999_999
_VERSION = re.compile(r"v(0|[1-9][0-9]{0,8})")
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,200}\.sbp")  # what a segment may name
_WRITTEN = re.compile(r"([A-Za-z0-9._:-]{1,128})-[0-9a-f]{16}\.sbp")  # what the writer makes of it
_STAGING = re.compile(r"\.(?P<name>.+)\.staging")


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadPath:
    """The parts of a path, each checked to be one plain component of our form."""

    policy_version: int
    run_id: RunId
    fan_out: str
    name: str
    is_staging: bool

    @property
    def folders(self) -> tuple[str, str, str]:
        """The folders from the root down to the file."""
        return (version_folder(self.policy_version), self.run_id, self.fan_out)

    @property
    def request_id(self) -> RequestId | None:
        """The request that the name speaks of; None for a name that no writer gave."""
        return request_of_name(self.name)

    def __str__(self) -> str:
        return "/".join((*self.folders, self.name))


def version_folder(policy_version: int) -> str:
    """The folder of one policy version."""
    assert 0 <= policy_version <= POLICY_VERSION_MAX, "policy versions are small and not negative"
    return f"v{policy_version}"


def version_of_folder(name: str) -> int | None:
    """The policy version of a folder below the root, or None when it is not one of ours."""
    match = _VERSION.fullmatch(name)
    return int(match[1]) if match else None


def is_fan_out(name: str) -> bool:
    """Whether a name below a run's folder is one of the 256 folders of files."""
    return _FAN_OUT.fullmatch(name) is not None


def fan_out(request_id: RequestId) -> str:
    """Two hex digits that spread requests evenly over 256 folders."""
    return f"{xxhash.xxh3_64_intdigest(request_id.encode()) & 0xFF:02x}"


def new_path(policy_version: int, run_id: RunId, request_id: RequestId) -> PayloadPath:
    """A fresh path for one request. Random, so that writers of the same request never meet."""
    return PayloadPath(
        policy_version=policy_version,
        run_id=run_id,
        fan_out=fan_out(request_id),
        name=f"{request_id}-{secrets.token_hex(8)}.sbp",
        is_staging=False,
    )


def staging_name(name: str) -> str:
    """The name under which a file is written: beside its target, hidden, never opened to read."""
    return f".{name}.staging"


def request_of_name(name: str) -> RequestId | None:
    """The request id in a file name, staging or not; None for a name that no writer gave."""
    match = _WRITTEN.fullmatch(target_name(name))
    return RequestId(match[1]) if match else None


def target_name(name: str) -> str:
    """The final name of a staging file; any other name as it is."""
    match = _STAGING.fullmatch(name)
    return match["name"] if match else name


def is_payload_name(name: str) -> bool:
    """Whether a name in a fan-out folder is a payload file or a staging leftover."""
    return _NAME.fullmatch(target_name(name)) is not None


def is_id(text: str) -> bool:
    """Whether ``text`` is a legal id, and so one plain path component."""
    try:
        check_id("run_id", text)
    except InvalidId:
        return False
    return True


def parse_path(file: str, *, run_id: RunId, allow_staging: bool = False) -> PayloadPath:
    """The parts of ``file``.

    Raises PathEscapesRoot when a part is not of our form (so none can climb), OtherRunPayload when
    it names another run than ``run_id``.
    """
    parts = file.split("/")
    if len(parts) != 4:
        raise PathEscapesRoot(file, "must be v<k>/<run id>/<hh>/<name>.sbp")
    version_name, found_run, hh, name = parts
    version = version_of_folder(version_name)
    if version is None or not is_id(found_run) or not is_fan_out(hh):
        raise PathEscapesRoot(file, "must be v<k>/<run id>/<hh>/<name>.sbp")
    is_staging = target_name(name) != name
    if not is_payload_name(name) or (is_staging and not allow_staging):
        raise PathEscapesRoot(file, "the name is not that of a payload file")
    if found_run != run_id:
        raise OtherRunPayload(file, found=found_run, expected=run_id)
    return PayloadPath(
        policy_version=version, run_id=run_id, fan_out=hh, name=name, is_staging=is_staging
    )
