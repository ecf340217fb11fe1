"""Folders made for a file to be written, and synced once: a sync costs as much as a small write.

A file survives a power cut when its own folder and every folder above it were synced after the
name below was made. The folder of the file is synced for each file; a folder above it needs that
only when it has changed since this process synced it with the same child in it.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from sideband.payload.errors import PathEscapesRoot
from sideband.payload.folders import (
    FOLDER_FLAGS,
    FOLDER_MODE,
    close_read,
    closed_on_error,
    opened_root,
    sync_folder,
)

_Key = tuple[tuple[str, ...], int, int]  # names from the root down, device, inode
_KNOWN_MAX: Final = 65_536  # 256 versions with all their folders; beyond, start over


class DurableFolders:
    """Which folders' names this process has seen synced. Thread-safe.

    A folder is known by its name, device and inode and by when the folder above it last changed:
    filesystems give a folder that another process makes anew the inode of the removed one. A copy
    that goes to another process knows nothing.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[_Key, int] = {}  # modification time of the folder above, nanoseconds

    def __reduce__(self) -> tuple[type["DurableFolders"], tuple[()]]:
        return (DurableFolders, ())

    @contextmanager
    def made(self, root: Path, names: Sequence[str], *, file: str) -> Iterator[list[int]]:
        """Descriptors of the root and of each of ``names`` below it, made where absent.

        Raises OSError, PathEscapesRoot for a link on the way (``file`` is named in it).
        """
        with ExitStack() as stack:
            fds = [stack.enter_context(opened_root(root))]
            for depth, name in enumerate(names, start=1):
                try:
                    fd = self._opened(fds[-1], tuple(names[:depth]))
                except OSError as exc:
                    if exc.errno in {errno.ENOTDIR, errno.ELOOP}:
                        raise PathEscapesRoot(file, f"{name} is not a plain folder") from exc
                    raise
                stack.callback(close_read, fd)
                fds.append(fd)
            yield fds

    def sync(self, fds: Sequence[int], names: Sequence[str]) -> None:
        """Sync the last folder, and each one above it unless its child is known to be synced.

        ``fds`` are those of ``made``. Raises OSError.
        """
        sync_folder(fds[-1])
        for depth in range(len(names), 0, -1):
            key = _key(fds[depth], tuple(names[:depth]))
            above_fd = fds[depth - 1]
            changed_ns = os.fstat(above_fd).st_mtime_ns  # before the sync: it may change again
            # Another writer may have made the child a moment ago and not have synced it yet.
            if self._known.get(key) != changed_ns:
                sync_folder(above_fd)
                if len(self._known) >= _KNOWN_MAX:
                    self._known.clear()
                self._known[key] = changed_ns

    def _opened(self, parent_fd: int, names: tuple[str, ...]) -> int:
        try:
            return os.open(names[-1], FOLDER_FLAGS, dir_fd=parent_fd)
        except FileNotFoundError:
            is_new = _make_folder(parent_fd, names[-1])
        fd = os.open(names[-1], FOLDER_FLAGS, dir_fd=parent_fd)
        if is_new:  # also where it was removed and made within one tick of the clock
            with closed_on_error(fd):
                self._known.pop(_key(fd, names), None)
        return fd


def _make_folder(parent_fd: int, name: str) -> bool:
    try:
        os.mkdir(name, FOLDER_MODE, dir_fd=parent_fd)
    except FileExistsError:
        return False  # another writer was faster: the same folder serves both
    return True


def _key(fd: int, names: tuple[str, ...]) -> _Key:
    status = os.fstat(fd)
    return (names, status.st_dev, status.st_ino)
