"""No descriptor is lost, whichever call of the operating system fails, in a write or in a read."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from sideband.payload import PayloadReader, PayloadRoot, WriteReport, writer
from sideband.payload.copying import COPY_BLOCKS
from sideband.payload.errors import PayloadError, WriteFailed
from tests.unit.payload.support import all_files, make_root, one_choice, rows_read, write_one

CALLS = [
    "open",
    "mkdir",
    "fstat",
    "pwrite",
    "lseek",
    "writev",
    "fsync",
    "fdatasync",
    "rename",
    "unlink",
    "close",
    "pread",
    "preadv",
]


class Fault:
    """Counts the calls of the operating system; the ``failing`` one (from 0) fails.

    No loop is compiled, which would make calls of its own.
    """

    def __init__(self, failing: int | None) -> None:
        self.failing, self.seen = failing, 0
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "Fault":
        self._patch.setattr(COPY_BLOCKS, "for_items", lambda count: None)
        for name in CALLS:
            self._patch.setattr(os, name, self._guarded(name, getattr(os, name)))
        return self

    def __exit__(self, *exc: object) -> None:
        self._patch.undo()

    def _guarded(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            if self.seen - 1 == self.failing:
                if name == "close":  # a descriptor whose closing failed is closed all the same
                    real(*args)
                raise OSError(errno.EIO, name)
            return real(*args, **kwargs)

        return call


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(params=[0, 1 << 60], ids=["written while checked", "written after"])
def any_writer(request: pytest.FixtureRequest) -> Iterator[None]:
    with patch.object(writer, "_OVERLAP_BYTES_MIN", request.param):
        yield


@pytest.mark.usefixtures("any_writer")
def test_a_write_is_whole_or_refused_and_loses_no_descriptor(tmp_path: Path) -> None:
    with Fault(None) as counted:
        write_one(make_root(tmp_path / "counted"))
    for failing in range(counted.seen):
        root = make_root(tmp_path / str(failing))
        before = descriptors()
        report: WriteReport | None = None
        with Fault(failing), suppress(WriteFailed):
            report = write_one(root)
        assert descriptors() == before, failing
        assert all_files(root) == ({report.file} if report else set()), failing


def test_a_read_loses_no_descriptor(root: PayloadRoot) -> None:
    report = write_one(root)
    whole = _read(root, report)
    with Fault(None) as counted:
        _read(root, report)
    refused = 0
    for failing in range(counted.seen):
        before = descriptors()
        with Fault(failing):
            try:
                assert _read(root, report) == whole
            except PayloadError:
                refused += 1
        assert descriptors() == before, failing
    assert refused


def _read(root: PayloadRoot, report: WriteReport) -> dict[int, bytes]:
    rows: dict[int, bytes] = {}
    with PayloadReader(root, model=None) as reader:
        for segment in report.segments[0]:
            for pos, data in rows_read(reader, [segment], one_choice()).items():
                rows[pos] = rows.get(pos, b"") + data
    return rows
