"""What is listed in a payload root and removed from it, by request, by version and by file."""

import errno
import os
from pathlib import Path

import pytest

from sideband.ids import RunId
from sideband.payload import PayloadRoot, StoredFile
from sideband.payload.errors import (
    PathEscapesRoot,
    PayloadError,
    WriteFailed,
)
from sideband.payload.paths import fan_out
from tests.unit.payload.support import REQUEST, RUN, write_one

RUN_2 = RunId("run-2")
HH = fan_out(REQUEST)


def test_files_of_a_request_are_its_own_with_leftovers(root: PayloadRoot) -> None:
    mine = [write_one(root).file or "" for _ in range(3)]
    write_one(root, request_id="req-1-a")
    write_one(root, policy_version=4)
    folder = root.path / "v3" / RUN / HH
    leftover = f".{REQUEST}-0123456789abcdef.sbp.staging"
    (folder / leftover).write_bytes(b"half")
    other = "req-10-0123456789abcdef.sbp"
    (folder / other).write_bytes(b"of another request in the same folder")
    (folder / "notes").write_text("foreign")
    expected = sorted([*mine, f"v3/{RUN}/{HH}/{leftover}"])
    assert root.files_of_request(3, REQUEST) == expected
    assert root.files_of_request(9, REQUEST) == []
    assert sum(root.delete(file) for file in expected) > 4
    assert root.files_of_request(3, REQUEST) == []
    assert (folder / other).exists()


def test_files_of_a_version_are_listed_with_size_and_time(root: PayloadRoot) -> None:
    reports = [write_one(root, request_id=f"request-{n}") for n in range(5)]
    write_one(root, policy_version=4)
    found = {stored.file: stored for stored in root.files(3)}
    assert set(found) == {report.file for report in reports}
    for report in reports:
        file = report.file or ""
        status = (root.path / file).stat()
        assert found[file] == StoredFile(
            file=file, size_bytes=report.size_bytes, modified_s=status.st_mtime
        )
        assert root.size(file) == report.size_bytes


def test_what_only_looks_like_a_file_of_ours_is_not_listed(
    root: PayloadRoot, tmp_path: Path
) -> None:
    file = write_one(root).file or ""
    run = root.path / "v3" / RUN
    (run / "zz").mkdir()
    (run / "readme").write_text("a stray file")
    (run / "ab").write_text("a file where a folder should be")
    (run / "cd").symlink_to(tmp_path)
    (run / HH / "x.sbp").mkdir()
    (run / HH / ".nfs0000").write_text("a deleted file that is still open elsewhere")
    assert [stored.file for stored in root.files(3)] == [file]


def test_what_vanishes_while_it_is_listed_is_skipped(root: PayloadRoot) -> None:
    files = sorted(write_one(root).file or "" for _ in range(3))
    listing = root.files(3)
    first = next(listing)
    for file in files:
        root.delete(file)
    assert first.file == files[0]
    assert list(listing) == []


def test_versions_are_those_with_a_folder_of_this_run(root: PayloadRoot) -> None:
    for version in (11, 2, 0):
        write_one(root, policy_version=version)
    (root.path / "v5" / RUN_2).mkdir(parents=True)
    (root.path / "v6").write_text("a file")
    (root.path / "v7").mkdir()
    (root.path / "v7" / RUN).symlink_to(root.path / "v2" / RUN)
    (root.path / "vx").mkdir()
    assert root.versions() == [0, 2, 11]


def test_removing_a_version_frees_its_bytes_and_leaves_other_runs(root: PayloadRoot) -> None:
    sizes = [write_one(root, request_id=f"request-{n}").size_bytes for n in range(3)]
    kept = write_one(root, policy_version=4).file or ""
    other = root.path / "v3" / RUN_2 / "00" / "x.sbp"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"of another run")
    assert root.remove_version(3) == sum(sizes)
    assert other.exists()
    assert root.size(kept) is not None
    assert root.remove_version(3) == 0
    assert root.remove_version(77) == 0
    assert root.remove_version(4) > 0
    assert not (root.path / "v4").exists()


def test_a_version_that_is_a_link_is_not_removed(root: PayloadRoot, tmp_path: Path) -> None:
    (tmp_path / "precious" / RUN).mkdir(parents=True)
    (root.path / "v3").symlink_to(tmp_path / "precious")
    with pytest.raises(PathEscapesRoot):
        root.remove_version(3)
    assert (tmp_path / "precious" / RUN).exists()


def test_a_writer_that_comes_while_a_version_is_removed_keeps_its_file(
    root: PayloadRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_one(root)
    whole = os.rmdir
    late: list[str] = []

    def rmdir(name: str, **options: int) -> None:
        if name == HH and not late:
            late.append(write_one(root).file or "")
        whole(name, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    root.remove_version(3)
    assert [stored.file for stored in root.files(3)] == late
    monkeypatch.undo()
    assert root.remove_version(3) > 0
    assert root.versions() == []


def test_deleting_says_what_it_freed(root: PayloadRoot) -> None:
    report = write_one(root)
    file = report.file or ""
    assert root.delete(file) == report.size_bytes
    assert root.delete(file) == 0
    assert root.size(file) is None


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_errors_of_listing_and_deleting_are_named(
    root: PayloadRoot, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file = write_one(root).file or ""

    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(number, "no")

    for name, calls in (
        ("unlink", [lambda: root.delete(file), lambda: root.remove_version(3)]),
        ("stat", [lambda: root.size(file), lambda: list(root.files(3))]),
        ("listdir", [lambda: root.files_of_request(3, REQUEST), root.versions]),
        ("rmdir", [lambda: root.remove_version(3)]),
        ("open", [lambda: root.size(file), lambda: root.remove_version(3)]),
    ):
        for call in calls:
            with monkeypatch.context() as patch:
                patch.setattr(os, name, fail)
                with pytest.raises(PayloadError):
                    call()


@pytest.mark.parametrize("call", ["open", "rmdir"])
def test_a_folder_that_cannot_be_removed_is_said(
    root: PayloadRoot, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write_one(root)
    whole = getattr(os, call)

    def fail(name: object, *args: object, **options: object) -> object:
        if name == HH:
            raise OSError(errno.EACCES, "no")
        return whole(name, *args, **options)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(WriteFailed) as caught:
        root.remove_version(3)
    assert caught.value.errno == errno.EACCES


def test_a_file_that_vanishes_while_its_version_is_removed(
    root: PayloadRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        write_one(root)
    whole = os.listdir

    def listdir(fd: int) -> list[str]:
        return [*whole(fd), "gone"]

    monkeypatch.setattr(os, "listdir", listdir)
    assert root.remove_version(3) > 0
    assert not (root.path / "v3").exists()
