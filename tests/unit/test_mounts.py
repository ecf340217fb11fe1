"""What the kernel's table of mounts says about locks."""

from pathlib import Path

import pytest

from sideband.mounts import UNKNOWN_MOUNT, Locks, deepest, mount_of, mounts_of

TABLE = """\
/dev/vda / ext4 rw,relatime 0 0
proc /proc proc rw 0 0
server:/a /mnt/a nfs4 rw,vers=4.2,local_lock=none,addr=198.18.0.1 0 0
server:/b /mnt/a/deep nfs rw,vers=3,local_lock=all 0 0
server:/c /mnt/with\\040space nfs rw,nolock 0 0
bucket /mnt/bucket fuse.s3fs rw 0 0
/dev/fuse /mnt/image fuse.appimage ro 0 0
mgs@tcp:/l /mnt/l lustre rw,flock,lazystatfs 0 0
mgs@tcp:/m /mnt/m lustre rw,lazystatfs 0 0
//server/share /mnt/share cifs rw,nobrl 0 0
beegfs_nodev /mnt/bee beegfs rw 0 0
tmpfs /mnt/a/deep/hidden tmpfs rw 0 0
server:/d /mnt/a/deep/hidden nfs4 rw,local_lock=posix 0 0
overlay /var/lib/docker/x overlay rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind", "locks"),
    [
        ("/home/me", "ext4", Locks.HELD),
        ("/mnt/a", "nfs4", Locks.HELD),
        ("/mnt/a/x/y", "nfs4", Locks.HELD),
        ("/mnt/another", "ext4", Locks.HELD),
        ("/mnt/a/deep/er", "nfs", Locks.LOCAL),
        ("/mnt/a/deep/hidden/x", "nfs4", Locks.LOCAL),
        ("/mnt/with space/x", "nfs", Locks.LOCAL),
        ("/mnt/bucket", "fuse.s3fs", Locks.UNKNOWN),
        ("/mnt/image", "fuse.appimage", Locks.UNKNOWN),
        ("/mnt/l", "lustre", Locks.HELD),
        ("/mnt/m", "lustre", Locks.LOCAL),
        ("/mnt/share", "cifs", Locks.LOCAL),
        ("/mnt/bee", "beegfs", Locks.UNKNOWN),
        ("/var/lib/docker/x/y", "overlay", Locks.HELD),
    ],
)
def test_a_path_is_judged_by_its_deepest_mount(path: str, kind: str, locks: Locks) -> None:
    mount = deepest(mounts_of(TABLE), Path(path))
    assert (mount.kind, mount.locks) == (kind, locks)


def test_a_path_without_a_mount_is_unknown() -> None:
    assert deepest([], Path("/x")) is UNKNOWN_MOUNT
    assert UNKNOWN_MOUNT.locks is Locks.UNKNOWN


def test_the_kernels_own_table_is_read() -> None:
    assert mount_of(Path("/proc/self/absent")).kind == "proc"
