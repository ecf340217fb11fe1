"""Two sides in one folder: files with a number each, written aside, synced, renamed. Blocking.

Each side writes into a folder of its own. On NFS a host that writes into the very folder in which
it waits for a name takes its own changes for all there are, and may never see the other's.
"""

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Final, Literal, Self, TypeVar

import msgspec

from sideband.doctor.errors import FolderUnusable, MeetingTaken, PeerSilent
from sideband.ids import check_id

FOLDER_PREFIX: Final = ".sideband-doctor-"
POLL_S: Final = 0.002
MESSAGE_BYTES_MAX: Final = 1 << 20

Role = Literal["lead", "follow"]
M = TypeVar("M")


class Meeting:
    """One side's view of the folder. The first side leads: making a folder is atomic everywhere."""

    def __init__(self, folder: Path, role: Role) -> None:
        self.folder, self.role = folder, role
        self.own = folder / role
        self.others = folder / ("follow" if role == "lead" else "lead")
        self._tick = threading.Event()  # never set: waiting on it is a sleep that has a name

    @classmethod
    def join(cls, root: Path, name: str) -> Self:
        """Lead if the folder is new, else follow.

        Raises InvalidId, MeetingTaken when two sides are there already, FolderUnusable.
        """
        folder = root / f"{FOLDER_PREFIX}{check_id('meet', name)}"
        try:
            role = _first_free(folder)
        except OSError as exc:
            raise FolderUnusable(folder, exc) from exc
        if role is None:
            raise MeetingTaken(folder)
        return cls(folder, role)

    def post(self, name: str, message: msgspec.Struct) -> None:
        """Make ``message`` visible under ``name``, whole. Raises FolderUnusable."""
        self.publish(name, msgspec.json.encode(message))

    def publish(self, name: str, content: bytes) -> None:
        """Write aside, sync, rename, sync the folder. Raises FolderUnusable."""
        try:
            publish(self.own, name, content)
        except OSError as exc:
            raise FolderUnusable(self.own, exc) from exc

    def wait(self, name: str, kind: type[M], *, timeout_s: float) -> M:
        """The message under ``name``, once it appears.

        It is asked for again and again by name, as a rank asks for a file. Raises PeerSilent,
        FolderUnusable.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                with open(self.others / name, "rb") as file:
                    return msgspec.json.decode(file.read(MESSAGE_BYTES_MAX), type=kind)
            except FileNotFoundError:
                self._tick.wait(POLL_S)
            except OSError as exc:
                if exc.errno != errno.ESTALE:
                    raise FolderUnusable(self.others, exc) from exc
                self._tick.wait(POLL_S)
        raise PeerSilent(name, timeout_s)

    def leave(self) -> None:
        """The leader removes the folder; a root with foreign things in it would be refused."""
        if self.role == "lead":
            shutil.rmtree(self.folder, ignore_errors=True)


def _first_free(folder: Path) -> Role | None:
    folder.mkdir(exist_ok=True)
    roles: tuple[Role, Role] = ("lead", "follow")
    for role in roles:
        try:
            (folder / role).mkdir()
        except FileExistsError:
            continue
        return role
    return None


def publish(folder: Path, name: str, content: bytes) -> None:
    """As the payload writer does: aside, fsync, rename, fsync of the folder. Raises OSError."""
    aside = folder / f".{name}.staging"
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(aside, folder / name)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)
