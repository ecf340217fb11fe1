"""The payload root: one run's folder on the shared filesystem, and what may be done in it.

A ``PayloadRoot`` is a plain value (a path and a run id), so it may be sent to another process, and
a remounted filesystem heals without a restart: each call opens the root anew and walks down by
descriptors (``folders``). Paths are relative to the root, since mount points differ between nodes.
All methods block: call them in a thread.

Errors: ForeignRoot, MissingMarker, OtherRun; PathEscapesRoot, OtherRunPayload, PayloadNotFound,
StalePayload, ReadFailed; WriteFailed.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sideband.ids import RequestId, RunId, check_id
from sideband.payload.durable import DurableFolders
from sideband.payload.errors import (
    MissingMarker,
    OtherRun,
    PathEscapesRoot,
    PayloadNotFound,
    ReadFailed,
    WriteFailed,
)
from sideband.payload.folders import (
    listed,
    open_plain,
    opened_root,
    remove_empty,
    remove_file,
    remove_tree,
    removed_on_error,
    staged,
    sync_folder,
    walked,
)
from sideband.payload.marker import (
    MARKER_NAME,
    is_marker_leftover,
    read_marker,
    require_empty,
    write_marker,
)
from sideband.payload.paths import (
    PayloadPath,
    fan_out,
    is_fan_out,
    is_payload_name,
    parse_path,
    request_of_name,
    staging_name,
    version_folder,
    version_of_folder,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A payload file or a staging leftover. ``modified_s`` is the filesystem's clock."""

    file: str
    size_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class PayloadRoot:
    """One run's payload root. Make it with ``create`` or ``open``, which look at the marker."""

    path: Path
    run_id: RunId
    durable: DurableFolders = field(default_factory=DurableFolders, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_id("run_id", self.run_id)  # it becomes a component of paths

    @classmethod
    def create(cls, path: Path, run_id: RunId, *, fresh: bool) -> "PayloadRoot":
        """Make or take over a root for ``run_id``.

        An absent or empty folder gets the marker. A marked one is wiped when ``fresh`` (only what
        Sideband made in it), else it must belong to ``run_id``: OtherRun. A folder with other
        things and no marker is refused either way: ForeignRoot.
        """
        check_id("run_id", run_id)
        try:
            _make_root(path)
            with opened_root(path) as root_fd:
                found = read_marker(root_fd, path)
                if found is None:
                    require_empty(root_fd, path)
                elif fresh:
                    _wipe(root_fd)
                elif found != run_id:
                    raise OtherRun(str(path), found=found, expected=run_id)
                if found != run_id:
                    write_marker(root_fd, run_id)
        except OSError as exc:
            raise WriteFailed(str(path), exc) from exc
        return cls(path, run_id)

    @classmethod
    def open(
        cls, path: Path, *, run_id: RunId | None = None, durable: DurableFolders | None = None
    ) -> "PayloadRoot":
        """The root at ``path``; with ``run_id`` only if it is that run's (OtherRun).

        A process that opens the root for each request (so that a wiped root is noticed) keeps one
        ``durable`` and gives it each time: it saves syncs. Raises MissingMarker when the folder is
        absent or no payload root.
        """
        try:
            with opened_root(path) as root_fd:
                found = read_marker(root_fd, path)
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise MissingMarker(str(path), "is not a folder") from exc
        except OSError as exc:
            raise ReadFailed(str(path), exc) from exc
        if found is None:
            raise MissingMarker(str(path), f"has no {MARKER_NAME}")
        if run_id is not None and found != run_id:
            raise OtherRun(str(path), found=found, expected=run_id)
        return cls(path, found, durable or DurableFolders())

    def open_file(self, path: PayloadPath) -> int:
        """A descriptor for reading a file of this run. The caller closes it."""
        file = str(path)
        with walked(self.path, path.folders, file=file) as folder_fd:
            return open_plain(folder_fd, path.name, file=file)

    def size(self, file: str) -> int | None:
        """Bytes of ``file`` (staging leftovers too), None when it is gone or no plain file."""
        path = parse_path(file, run_id=self.run_id, allow_staging=True)
        stored = self._stored(path)
        return stored.size_bytes if stored else None

    def delete(self, file: str) -> int:
        """Remove ``file`` (staging leftovers too); the bytes freed, 0 when it was gone.

        Not synced: a deletion that a power cut forgets is an orphan for the sweep.
        """
        path = parse_path(file, run_id=self.run_id, allow_staging=True)
        try:
            with walked(self.path, path.folders, file=file) as folder_fd, _writing(file):
                return remove_file(folder_fd, path.name)
        except PayloadNotFound:
            return 0

    def files_of_request(self, policy_version: int, request_id: RequestId) -> list[str]:
        """All files of one request, staging leftovers too, by one folder listing."""
        folders = (version_folder(policy_version), self.run_id, fan_out(request_id))
        names = listed(self.path, folders)
        return ["/".join((*folders, name)) for name in names if request_of_name(name) == request_id]

    def versions(self) -> list[int]:
        """Policy versions with a folder of this run, ascending."""
        found = (version_of_folder(name) for name in listed(self.path, ()))
        return sorted(v for v in found if v is not None and self._has_version(v))

    def files(self, policy_version: int) -> Iterator[StoredFile]:
        """All files of one version of this run, staging leftovers too; what vanishes is skipped."""
        folders = (version_folder(policy_version), self.run_id)
        for hh in filter(is_fan_out, listed(self.path, folders)):
            for name in self._names((*folders, hh)):
                file = "/".join((*folders, hh, name))
                stored = self._stored(parse_path(file, run_id=self.run_id, allow_staging=True))
                if stored is not None:
                    yield stored

    def remove_version(self, policy_version: int) -> int:
        """Remove this run's folder of one version, links unfollowed; returns the bytes freed.

        The folders of other runs in the same version stay.
        """
        version = version_folder(policy_version)
        try:
            with _writing(version), opened_root(self.path) as root_fd:
                with walked(self.path, (version,), file=version) as version_fd:
                    freed = remove_tree(version_fd, self.run_id)
                remove_empty(root_fd, version)
                return freed
        except PayloadNotFound:
            return 0

    def _names(self, folders: tuple[str, ...]) -> list[str]:
        """Payload files and leftovers in a folder; none in what only looks like one of ours."""
        try:
            return [name for name in listed(self.path, folders) if is_payload_name(name)]
        except PathEscapesRoot:
            return []

    def _has_version(self, policy_version: int) -> bool:
        folders = (version_folder(policy_version), self.run_id)
        try:
            with walked(self.path, folders, file="/".join(folders)):
                return True
        except (PayloadNotFound, PathEscapesRoot):  # not there, or not ours
            return False

    def _stored(self, path: PayloadPath) -> StoredFile | None:
        file = str(path)
        try:
            with walked(self.path, path.folders, file=file) as fd:
                status = os.stat(path.name, dir_fd=fd, follow_symlinks=False)
        except (PayloadNotFound, FileNotFoundError):
            return None
        except OSError as exc:
            raise ReadFailed(file, exc) from exc
        if not stat.S_ISREG(status.st_mode):
            return None
        return StoredFile(file=file, size_bytes=status.st_size, modified_s=status.st_mtime)


@contextmanager
def published(root: PayloadRoot, path: PayloadPath) -> Iterator[int]:
    """A descriptor to write the file of ``path`` to. The file appears when the block succeeds.

    Written aside, synced, renamed, its folders synced.
    Raises WriteFailed, PathEscapesRoot; after any error there is at most a staging file left.
    """
    file = str(path)
    with (
        _writing(file),
        root.durable.made(root.path, path.folders, file=file) as fds,
        removed_on_error(fds[-1], path.name),
    ):
        with staged(fds[-1], staging_name(path.name), path.name) as fd:
            yield fd
        root.durable.sync(fds, path.folders)


@contextmanager
def _writing(file: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise WriteFailed(file, exc) from exc


def _make_root(path: Path) -> None:
    """Make the folder and those above it, each name durable."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in made:
        with opened_root(folder.parent) as parent_fd:
            sync_folder(parent_fd)


def _wipe(root_fd: int) -> None:
    """Remove what Sideband made, the marker last kept: a crash half way can be repeated."""
    for name in os.listdir(root_fd):
        if version_of_folder(name) is not None or is_marker_leftover(name):
            remove_tree(root_fd, name)
    sync_folder(root_fd)
