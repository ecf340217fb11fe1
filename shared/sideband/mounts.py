"""Which mount a path lies on, and whether locks that are taken there hold on other hosts.

An embedded ledger is one process's by a file lock. On a filesystem that many hosts mount the lock
must be the server's: one that the host keeps to itself lets two orchestrators write one ledger.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

MOUNTS: Final = Path("/proc/self/mounts")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
_MEMORY: Final = frozenset({"tmpfs", "ramfs", "overlay", "zfs", "rootfs"})  # without a device
_NFS_LOCAL: Final = frozenset({"nolock", "local_lock=all", "local_lock=posix"})
_LOCAL: Final = {
    "nfs": _NFS_LOCAL,
    "nfs4": _NFS_LOCAL,
    "cifs": frozenset({"nobrl"}),
    "smb3": frozenset({"nobrl"}),
    "lustre": frozenset({"localflock", "noflock"}),
}
_SERVED: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "gpfs", "ocfs2", "gfs2"})


class Locks(StrEnum):
    """What a file lock keeps out."""

    HELD = "held"  # everybody: it is the server's, or no other host mounts this
    LOCAL = "local"  # this host's processes at most
    UNKNOWN = "unknown"  # the mount does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of the kernel's table."""

    device: str
    point: str
    kind: str
    options: frozenset[str] = frozenset()

    @property
    def locks(self) -> Locks:
        """What is promised by the kind and the options; only two hosts can try it."""
        if self.options & _LOCAL.get(self.kind, frozenset()):
            return Locks.LOCAL
        if self.kind == "lustre":
            return Locks.HELD if "flock" in self.options else Locks.LOCAL
        if self.kind in _SERVED | _MEMORY or self.device.startswith("/dev/"):
            return Locks.UNKNOWN if self.kind.startswith("fuse") else Locks.HELD
        return Locks.UNKNOWN


UNKNOWN_MOUNT: Final = Mount(device="unknown", point="/", kind="unknown")


def mounts_of(table: str) -> list[Mount]:
    """The lines of ``/proc/self/mounts``, in the order in which they were mounted."""
    found = []
    for line in table.splitlines():
        device, point, kind, options, *_ = map(_plain, line.split(" "))
        mount = Mount(device=device, point=point, kind=kind, options=frozenset(options.split(",")))
        found.append(mount)
    return found


def deepest(mounts: list[Mount], path: Path) -> Mount:
    """The mount that an absolute path lies on: of those on one point the last hides the others."""
    above = [mount for mount in mounts if path.is_relative_to(mount.point)]
    return max(reversed(above), key=lambda mount: len(mount.point), default=UNKNOWN_MOUNT)


def mount_of(path: Path) -> Mount:
    """The mount of ``path``, which need not exist; UNKNOWN_MOUNT off Linux. Blocks."""
    try:
        table = MOUNTS.read_text(errors="surrogateescape")
    except FileNotFoundError:
        return UNKNOWN_MOUNT
    return deepest(mounts_of(table), path.resolve())


def _plain(field: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), field)
