"""What keeps the doctor from measuring.

DoctorError (SidebandError)
├── FolderUnusable   the folder cannot be made, read or written
├── MeetingTaken     two sides met already under that name
└── PeerSilent       the other side did not answer in time
"""

from pathlib import Path

from sideband.errors import SidebandError


class DoctorError(SidebandError):
    """The measurement could not be made; it says nothing about the filesystem's fitness."""


class FolderUnusable(DoctorError):
    """The operating system refuses what a payload root needs."""

    def __init__(self, path: Path, error: OSError) -> None:
        self.path, self.error = path, error
        super().__init__(
            f"{path}: {error.strerror or error}: the doctor must be able to write there"
        )


class MeetingTaken(DoctorError):
    """A third side came, or the folder of an earlier meeting was left behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"{path} is in use by two sides: choose another name, or remove it")


class PeerSilent(DoctorError):
    """The other side did not come, or stopped."""

    def __init__(self, part: str, timeout_s: float) -> None:
        self.part, self.timeout_s = part, timeout_s
        super().__init__(
            f"no {part} from the other side within {timeout_s:.0f} s: run the same command there"
        )
