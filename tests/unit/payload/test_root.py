"""Who may use, take over and wipe a payload root."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sideband.errors import InvalidId
from sideband.ids import RunId
from sideband.payload import PayloadRoot, folders
from sideband.payload.errors import (
    ForeignRoot,
    MissingMarker,
    OtherRun,
    ReadFailed,
    WriteFailed,
)
from sideband.payload.marker import MARKER_BYTES_MAX, MARKER_NAME
from sideband.payload.paths import fan_out
from tests.unit.payload.support import REQUEST, RUN, all_files, make_root, write_one

RUN_2 = RunId("run-2")
HH = fan_out(REQUEST)


def marker(path: Path) -> Path:
    return path / MARKER_NAME


def test_a_root_is_made_with_its_marker(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "payloads"
    root = PayloadRoot.create(path, RUN, fresh=False)
    assert (root.path, root.run_id) == (path, RUN)
    assert marker(path).read_bytes() == b'{"format":"sideband-root","version":1,"run_id":"run-1"}'
    assert PayloadRoot.open(path) == root
    assert PayloadRoot.open(path, run_id=RUN) == root
    assert [child.name for child in path.iterdir()] == [MARKER_NAME]


@pytest.mark.parametrize("fresh", [False, True])
def test_an_empty_folder_becomes_a_root(tmp_path: Path, fresh: bool) -> None:
    assert PayloadRoot.create(tmp_path, RUN, fresh=fresh).run_id == RUN


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", ["data", ".hidden", "v3", "lost+found", "v3/run-1/00/x.sbp"])
def test_a_folder_with_other_things_is_neither_used_nor_wiped(
    tmp_path: Path, fresh: bool, name: str
) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("precious")
    with pytest.raises(ForeignRoot) as caught:
        PayloadRoot.create(tmp_path, RUN, fresh=fresh)
    assert (caught.value.path, caught.value.found) == (str(tmp_path), name.split("/")[0])
    assert (tmp_path / name).read_text() == "precious"
    assert not marker(tmp_path).exists()


def test_a_resumed_run_keeps_its_files(root: PayloadRoot) -> None:
    write_one(root)
    before = all_files(root)
    assert PayloadRoot.create(root.path, RUN, fresh=False) == root
    assert all_files(root) == before


def test_another_run_may_not_resume_it(root: PayloadRoot) -> None:
    write_one(root)
    with pytest.raises(OtherRun) as caught:
        PayloadRoot.create(root.path, RUN_2, fresh=False)
    assert (caught.value.found, caught.value.expected) == (RUN, RUN_2)
    with pytest.raises(OtherRun):
        PayloadRoot.open(root.path, run_id=RUN_2)
    assert PayloadRoot.open(root.path).run_id == RUN


@pytest.mark.parametrize("run_id", [RUN, RUN_2])
def test_a_fresh_run_wipes_what_sideband_made_and_nothing_else(
    root: PayloadRoot, run_id: RunId
) -> None:
    write_one(root)
    write_one(root, policy_version=12)
    (root.path / "notes.txt").write_text("of the operator")
    (root.path / "v3x").mkdir()
    (root.path / f"{MARKER_NAME}.0123").write_text("half")
    fresh = PayloadRoot.create(root.path, run_id, fresh=True)
    assert sorted(child.name for child in root.path.iterdir()) == [MARKER_NAME, "notes.txt", "v3x"]
    assert PayloadRoot.open(root.path) == fresh
    assert fresh.run_id == run_id


def test_wiping_unlinks_links_and_never_follows_them(root: PayloadRoot, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "deep").mkdir(parents=True)
    (precious / "deep" / "file").write_text("kept")
    write_one(root)
    for place in ("v5", "v3/link", "v3/run-1/link", f"v3/run-1/{HH}/link"):
        (root.path / place).symlink_to(precious)
    (root.path / "v3/run-1/to-file").symlink_to(precious / "deep" / "file")
    os.mkfifo(root.path / "v3" / "fifo")
    PayloadRoot.create(root.path, RUN, fresh=True)
    assert [child.name for child in root.path.iterdir()] == [MARKER_NAME]
    assert (precious / "deep" / "file").read_text() == "kept"


def test_a_folder_swapped_for_a_link_while_it_is_wiped(
    root: PayloadRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_one(root)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    whole = os.listdir

    def swap(fd: int) -> list[str]:
        names = whole(fd)
        if "run-1" in names:
            (root.path / "v3" / "run-1").rename(tmp_path / "moved")
            (root.path / "v3" / "run-1").symlink_to(precious)
        return names

    monkeypatch.setattr(os, "listdir", swap)
    root.remove_version(3)
    PayloadRoot.create(root.path, RUN, fresh=True)
    assert (precious / "file").read_text() == "kept"
    assert not (root.path / "v3").exists()


def test_a_wipe_that_dies_half_way_can_be_repeated(
    root: PayloadRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2, 3):
        write_one(root, policy_version=version)
    whole = os.rmdir

    def fail(name: str, **options: int) -> None:
        if name == "v2":
            raise OSError(errno.EIO, "no")
        whole(name, **options)

    monkeypatch.setattr(os, "rmdir", fail)
    with pytest.raises(WriteFailed):
        PayloadRoot.create(root.path, RUN_2, fresh=True)
    assert PayloadRoot.open(root.path).run_id == RUN  # still the old run's, so not foreign
    monkeypatch.undo()
    PayloadRoot.create(root.path, RUN_2, fresh=True)
    assert [child.name for child in root.path.iterdir()] == [MARKER_NAME]


def test_folders_deeper_than_ours_are_not_wiped_for_ever(root: PayloadRoot) -> None:
    deep = root.path / "v3" / Path(*["d"] * (folders.TREE_DEPTH_MAX + 3))
    deep.mkdir(parents=True)
    with pytest.raises(WriteFailed, match="deep"):
        PayloadRoot.create(root.path, RUN, fresh=True)
    assert deep.exists()


def no_folder(path: Path) -> None:
    pass


def plain_file(path: Path) -> None:
    path.write_text("")


def no_marker(path: Path) -> None:
    path.mkdir()
    (path / "v3").mkdir()


def marked(data: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        marker(path).write_bytes(data)

    return make


def linked_marker(path: Path) -> None:
    path.mkdir()
    make_root(path.parent / "other")
    marker(path).symlink_to(marker(path.parent / "other"))


def folder_as_marker(path: Path) -> None:
    path.mkdir()
    marker(path).mkdir()


def fifo_as_marker(path: Path) -> None:
    path.mkdir()
    os.mkfifo(marker(path))


RIGHT = b'{"format":"sideband-root","version":1,"run_id":"run-1"}'
NOT_ROOTS: dict[str, Callable[[Path], None]] = {
    "absent": no_folder,
    "a file": plain_file,
    "no marker": no_marker,
    "an empty marker": marked(b""),
    "a torn marker": marked(RIGHT[:-1]),
    "another format": marked(RIGHT.replace(b"sideband", b"saltband")),
    "a later version": marked(RIGHT.replace(b"1,", b"2,")),
    "an unknown key": marked(RIGHT[:-1] + b',"more":1}'),
    "no run": marked(b'{"format":"sideband-root","version":1}'),
    "a run that climbs": marked(RIGHT.replace(b"run-1", b"..")),
    "a run that is no id": marked(RIGHT.replace(b"run-1", b"a/b")),
    "a large marker": marked(RIGHT + b" " * MARKER_BYTES_MAX),
    "no text": marked(b"\xff\xfe\x00"),
    "a link": linked_marker,
    "a folder": folder_as_marker,
    "a FIFO": fifo_as_marker,
}


@pytest.mark.parametrize("make", NOT_ROOTS.values(), ids=NOT_ROOTS.keys())
def test_what_is_no_root_is_not_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "payloads"
    make(path)
    with pytest.raises(MissingMarker) as caught:
        PayloadRoot.open(path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", [n for n in NOT_ROOTS if n not in ("absent", "a file")])
def test_what_is_no_root_is_not_taken_over(tmp_path: Path, name: str, fresh: bool) -> None:
    path = tmp_path / "payloads"
    NOT_ROOTS[name](path)
    with pytest.raises((ForeignRoot, MissingMarker)):
        PayloadRoot.create(path, RUN, fresh=fresh)


def test_a_file_is_no_place_for_a_root(tmp_path: Path) -> None:
    plain_file(tmp_path / "payloads")
    with pytest.raises(WriteFailed):
        PayloadRoot.create(tmp_path / "payloads", RUN, fresh=True)


@pytest.mark.parametrize("run_id", ["", "..", "a/b", "x" * 129])
def test_a_run_id_that_cannot_be_makes_no_folder(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(InvalidId):
        PayloadRoot.create(tmp_path / "payloads", RunId(run_id), fresh=True)
    assert not (tmp_path / "payloads").exists()


@pytest.mark.parametrize("call", ["fsync", "rename", "writev"])
def test_a_marker_that_cannot_be_written_makes_no_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    tmp_path.joinpath("payloads").mkdir()
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(WriteFailed) as caught:
        PayloadRoot.create(tmp_path / "payloads", RUN, fresh=True)
    assert caught.value.errno == errno.ENOSPC
    assert list((tmp_path / "payloads").iterdir()) == []
    monkeypatch.undo()
    make_root(tmp_path / "payloads")


def test_a_marker_left_half_written_does_not_make_a_folder_foreign(tmp_path: Path) -> None:
    (tmp_path / f"{MARKER_NAME}.0123456789abcdef").write_text('{"form')
    assert PayloadRoot.create(tmp_path, RUN, fresh=False).run_id == RUN


@pytest.mark.parametrize("name", ["open", "read"])
def test_a_root_that_cannot_be_read_is_not_a_missing_one(
    root: PayloadRoot, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(ReadFailed) as caught:
        PayloadRoot.open(root.path)
    assert caught.value.errno == errno.EIO


def test_a_marker_that_cannot_be_opened_is_not_a_missing_one(
    root: PayloadRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.open

    def fail(path: str, flags: int, *args: int, **options: int) -> int:
        if path == MARKER_NAME:
            raise OSError(errno.EACCES, "no")
        return whole(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(ReadFailed):
        PayloadRoot.open(root.path)
