"""The marker that makes a folder a payload root, and the only licence to wipe it."""

import errno
import os
import secrets
from pathlib import Path
from typing import Final

import msgspec

from sideband.errors import InvalidId
from sideband.ids import RunId, check_id
from sideband.payload.errors import ForeignRoot, MissingMarker
from sideband.payload.folders import close_read, staged, sync_folder
from sideband.payload.io import write_all

MARKER_NAME: Final = ".sideband-root.json"
MARKER_BYTES_MAX: Final = 4096
_MARKER_FORMAT: Final = "sideband-root"


class RootMarker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the marker says."""

    format: str
    version: int
    run_id: str


def read_marker(root_fd: int, path: Path) -> RunId | None:
    """The run that the root belongs to; None without a marker.

    Raises MissingMarker for something of that name that is no marker of ours, OSError.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(MARKER_NAME, flags, dir_fd=root_fd)
    except FileNotFoundError:
        return None
    except OSError as exc:
        if exc.errno not in {errno.ELOOP, errno.ENXIO}:
            raise
        raise MissingMarker(str(path), "its marker is not a plain file") from exc
    try:
        data = os.read(fd, MARKER_BYTES_MAX + 1)
    except IsADirectoryError as exc:
        raise MissingMarker(str(path), "its marker is not a plain file") from exc
    finally:
        close_read(fd)
    return _parse(data, path)


def _parse(data: bytes, path: Path) -> RunId:
    if len(data) > MARKER_BYTES_MAX:
        raise MissingMarker(str(path), f"its marker is over {MARKER_BYTES_MAX} bytes")
    try:
        marker = msgspec.json.decode(data, type=RootMarker)
        run_id = RunId(check_id("run_id", marker.run_id))
    except (msgspec.MsgspecError, InvalidId) as exc:
        raise MissingMarker(str(path), f"its marker is not one of ours: {exc}") from exc
    if (marker.format, marker.version) != (_MARKER_FORMAT, 1):
        raise MissingMarker(str(path), f"its marker is a {marker.format} {marker.version}")
    return run_id


def write_marker(root_fd: int, run_id: RunId) -> None:
    """Make the folder the root of ``run_id``, all or nothing. Raises OSError."""
    marker = RootMarker(format=_MARKER_FORMAT, version=1, run_id=run_id)
    staging = f"{MARKER_NAME}.{secrets.token_hex(8)}"  # two starters at once must not meet
    with staged(root_fd, staging, MARKER_NAME) as fd:
        write_all(fd, [msgspec.json.encode(marker)])
    sync_folder(root_fd)


def is_marker_leftover(name: str) -> bool:
    """A marker that a crash left half written: it does not make a folder foreign."""
    return name.startswith(f"{MARKER_NAME}.")


def require_empty(root_fd: int, path: Path) -> None:
    """Raises ForeignRoot when a folder without a marker holds anything else than leftovers."""
    for name in sorted(os.listdir(root_fd)):
        if not is_marker_leftover(name):
            raise ForeignRoot(str(path), found=name)
