"""Folders by descriptor: the walk from the root that no link and no ``..`` can lead astray.

Each component is opened relative to its parent's descriptor and refused when it is a link, so a
folder that is swapped for a link between two calls changes nothing. Paths are checked by
``paths.parse_path`` before they come here. All functions block: call them in a thread.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from sideband.payload.errors import PathEscapesRoot, PayloadNotFound, read_error

FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO must not wait for a writer; it changes nothing for a plain file.
FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
FOLDER_MODE: Final = 0o775  # engines and trainers may run as different users of one group
FILE_MODE: Final = 0o664
_KEPT_BY_NFS: Final = ".nfs"
TREE_DEPTH_MAX: Final = 32  # ours are 4 deep; each level costs a descriptor while it is removed


@contextmanager
def opened_root(path: Path) -> Iterator[int]:
    """A descriptor of the root folder. The root itself may be a link: the operator made it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        close_read(fd)


def close_read(fd: int) -> None:
    """Close a folder, or a file that was only read: an error of that says nothing about its bytes.

    Linux gives the descriptor back whatever it answers.
    """
    with suppress(OSError):
        os.close(fd)


@contextmanager
def walked(root: Path, folders: Sequence[str], *, file: str) -> Iterator[int]:
    """A descriptor of the last of ``folders``, reached one by one from the root.

    ``file`` is named in errors: PathEscapesRoot for a link or a non-folder on the way,
    PayloadNotFound, StalePayload, ReadFailed.
    """
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise read_error(file, exc) from exc
    try:
        for name in folders:
            fd = _step(fd, name, file)
        yield fd
    finally:
        close_read(fd)


def _step(parent_fd: int, name: str, file: str) -> int:
    """Descend one folder; closes ``parent_fd`` only when it succeeds."""
    try:
        fd = os.open(name, FOLDER_FLAGS, dir_fd=parent_fd)
    except OSError as exc:
        if exc.errno in {errno.ENOTDIR, errno.ELOOP}:
            raise PathEscapesRoot(file, f"{name} is not a plain folder") from exc
        raise read_error(file, exc) from exc
    close_read(parent_fd)
    return fd


def open_plain(folder_fd: int, name: str, *, file: str) -> int:
    """A descriptor of the regular file ``name``, for reading. The caller closes it.

    Raises PathEscapesRoot for a link or anything else that is not a plain file.
    """
    try:
        fd = os.open(name, FILE_FLAGS, dir_fd=folder_fd)
    except OSError as exc:
        if exc.errno in {errno.ELOOP, errno.ENXIO, errno.ENODEV}:  # a link, a socket, a device
            raise PathEscapesRoot(file, f"{name} is not a plain file") from exc
        raise read_error(file, exc) from exc
    with closed_on_error(fd):
        try:
            mode = os.fstat(fd).st_mode
        except OSError as exc:
            raise read_error(file, exc) from exc
        if not stat.S_ISREG(mode):
            raise PathEscapesRoot(file, f"{name} is not a plain file")
    return fd


@contextmanager
def closed_on_error(fd: int) -> Iterator[None]:
    """Closes ``fd`` unless the block succeeds: then it is the caller's."""
    is_done = False  # an ExitStack costs more than opening the file
    try:
        yield
        is_done = True
    finally:
        if not is_done:
            close_read(fd)


@contextmanager
def _translated(file: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise read_error(file, exc) from exc


@contextmanager
def staged(folder_fd: int, staging: str, name: str) -> Iterator[int]:
    """A new file ``staging`` for writing, synced and renamed to ``name`` when the block succeeds.

    When anything fails before or in that, the file is removed. The caller syncs the folder.
    Raises OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(staging, flags, FILE_MODE, dir_fd=folder_fd)
    with removed_on_error(folder_fd, staging):
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(staging, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)


@contextmanager
def removed_on_error(folder_fd: int, name: str) -> Iterator[None]:
    """Removes ``name`` unless the block succeeds; the first error is the one that is told."""
    with ExitStack() as stack:
        stack.callback(_remove_if_possible, folder_fd, name)
        yield
        stack.pop_all()


def _remove_if_possible(folder_fd: int, name: str) -> None:
    with suppress(OSError):  # what stays is a leftover for the sweep
        os.unlink(name, dir_fd=folder_fd)


def sync_folder(fd: int) -> None:
    """Make the names in a folder survive a power cut, where the filesystem can."""
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno not in {errno.EINVAL, errno.ENOTSUP}:  # network filesystems without it
            raise


def remove_tree(parent_fd: int, name: str, *, depth_max: int = TREE_DEPTH_MAX) -> int:
    """Remove ``name`` in ``parent_fd`` and all below it; returns the bytes of the files removed.

    Goes by descriptors and unlinks links instead of following them. What vanishes meanwhile is
    fine; what NFS keeps for a reader of this host stays, with its folders, until it is closed.
    Raises OSError, also for folders nested deeper than any of ours.
    """
    if depth_max == 0:
        raise OSError(errno.ELOOP, f"folders nested over {TREE_DEPTH_MAX} deep", name)
    try:
        folder_fd = os.open(name, FOLDER_FLAGS, dir_fd=parent_fd)
    except FileNotFoundError:
        return 0
    except OSError as exc:
        if exc.errno not in {errno.ENOTDIR, errno.ELOOP}:
            raise
        return _remove_unless_kept(parent_fd, name)
    try:
        freed = sum(
            remove_tree(folder_fd, entry, depth_max=depth_max - 1)
            for entry in os.listdir(folder_fd)
        )
    finally:
        close_read(folder_fd)
    remove_empty(parent_fd, name)
    return freed


def _remove_unless_kept(parent_fd: int, name: str) -> int:
    """``remove_file``, but a removed file that is open on this host is left to NFS, which renames
    it to .nfs…, refuses to unlink it, and removes it when it is closed."""
    try:
        return remove_file(parent_fd, name)
    except OSError as exc:
        if exc.errno != errno.EBUSY or not name.startswith(_KEPT_BY_NFS):
            raise
        return 0


def remove_file(parent_fd: int, name: str) -> int:
    """Unlink ``name``; returns its bytes, 0 when it was gone or is no plain file."""
    try:
        status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        os.unlink(name, dir_fd=parent_fd)
    except FileNotFoundError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def remove_empty(parent_fd: int, name: str) -> bool:
    """Remove the folder ``name`` when it is empty; a writer may have put a file in meanwhile."""
    try:
        os.rmdir(name, dir_fd=parent_fd)
    except FileNotFoundError:
        return True
    except OSError as exc:
        if exc.errno in {errno.ENOTEMPTY, errno.EEXIST}:
            return False
        raise
    return True


def listed(root: Path, folders: Sequence[str]) -> list[str]:
    """Names in a folder below the root, sorted; none when it does not exist or is no folder.

    Raises PathEscapesRoot, StalePayload, ReadFailed.
    """
    file = "/".join(folders)
    try:
        with walked(root, folders, file=file) as fd, _translated(file):
            return sorted(os.listdir(fd))
    except PayloadNotFound:
        return []
