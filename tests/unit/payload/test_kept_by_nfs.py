"""NFS renames a removed file that a reader of the same host has open, and refuses to unlink it."""

import errno
import os
from typing import Any

import pytest

from sideband.payload import PayloadRoot
from sideband.payload.errors import WriteFailed
from tests.unit.payload.support import RUN, file_path, write_one

KEPT = ".nfs000000000000007700000001"


@pytest.fixture
def kept(root: PayloadRoot, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of version 3 holds a file as NFS keeps it: unlinking it is refused."""
    folder = file_path(root, write_one(root)).parent
    (folder / KEPT).write_bytes(b"still open")
    real = os.unlink

    def unlink(path: str, **options: Any) -> None:
        if path == KEPT:
            raise OSError(errno.EBUSY, "Device or resource busy")
        real(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    return folder.relative_to(root.path).as_posix()


def test_a_sweep_leaves_it_and_removes_the_rest(
    root: PayloadRoot, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert root.remove_version(3) > 0
    assert os.listdir(root.path / kept) == [KEPT]
    assert root.remove_version(3) == 0
    monkeypatch.undo()
    (root.path / kept / KEPT).unlink()  # its reader closed it
    root.remove_version(3)
    assert root.versions() == []


def test_a_fresh_run_starts_beside_it(root: PayloadRoot, kept: str) -> None:
    write_one(root, policy_version=4)
    PayloadRoot.create(root.path, RUN, fresh=True)
    assert os.listdir(root.path / kept) == [KEPT]
    assert root.versions() == [3]


def test_other_files_that_cannot_be_removed_are_an_error(
    root: PayloadRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_one(root)

    def unlink(path: str, **options: Any) -> None:
        raise OSError(errno.EBUSY, path)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(WriteFailed):
        root.remove_version(3)
