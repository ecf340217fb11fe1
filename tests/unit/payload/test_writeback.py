"""A hint to the disk: it changes no byte, and it is no place where an error is told."""

import os
from pathlib import Path

import pytest

from sideband.payload import writeback
from sideband.payload.writeback import begin_writeback


def test_the_file_stays_as_it_was_written(tmp_path: Path) -> None:
    data = os.urandom(1 << 20)
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        file.write(data)
        begin_writeback(file.fileno(), 4096, len(data) - 4096)
        os.fsync(file.fileno())
        assert os.pread(file.fileno(), len(data) + 1, 0) == data
        assert file.tell() == len(data)


def test_it_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_writeback(-1, 0, 4096)
    monkeypatch.setattr(writeback, "_SYNC_FILE_RANGE", None)  # of another system
    begin_writeback(-1, 0, 4096)


def test_this_machine_has_the_call() -> None:
    """Else every writer here waits for the whole file in its sync, and no test would notice."""
    assert writeback._SYNC_FILE_RANGE is not None
    assert writeback._SYNC_FILE_RANGE(-1, 0, 1, 2) == -1
