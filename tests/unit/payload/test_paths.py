"""No path and no link leads a reader out of the root, and nothing but plain files is opened."""

import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.errors import InvalidId
from sideband.ids import RequestId, RunId
from sideband.payload import PayloadError, PayloadReader, PayloadRoot
from sideband.payload.errors import (
    OtherRunPayload,
    PathEscapesRoot,
    PayloadNotFound,
    ReadFailed,
    WriteFailed,
)
from sideband.payload.paths import (
    PayloadPath,
    fan_out,
    new_path,
    parse_path,
    request_of_name,
    staging_name,
    version_folder,
    version_of_folder,
)
from tests.unit.payload.support import REQUEST, RUN, make_root, one_choice, write, write_one

GOOD = "v3/run-1/0a/req-1-0123456789abcdef.sbp"
IDS = st.from_regex(r"[A-Za-z0-9._:-]{1,128}", fullmatch=True).filter(
    lambda s: s not in (".", "..")
)


@given(version=st.integers(0, 999_999_999), run_id=IDS, request_id=IDS)
def test_paths_of_any_ids_are_read_back(version: int, run_id: str, request_id: str) -> None:
    path = new_path(version, RunId(run_id), RequestId(request_id))
    found = parse_path(str(path), run_id=RunId(run_id))
    assert found == path
    assert (found.request_id, found.policy_version) == (request_id, version)
    assert found.fan_out == fan_out(RequestId(request_id))
    staging = staging_name(path.name)
    assert request_of_name(staging) == request_id
    assert len(staging.encode()) <= 255
    leftover = "/".join((*path.folders, staging))
    assert parse_path(leftover, run_id=RunId(run_id), allow_staging=True).is_staging
    with pytest.raises(PathEscapesRoot):
        parse_path(leftover, run_id=RunId(run_id))


@pytest.mark.parametrize(
    "file",
    [
        "",
        "/",
        "x.sbp",
        "/etc/passwd",
        "../../etc/passwd",
        f"/{GOOD}",
        f"./{GOOD}",
        f"{GOOD}/",
        GOOD.replace("run-1", ".."),
        GOOD.replace("run-1", "."),
        GOOD.replace("run-1", ""),
        GOOD.replace("v3", ".."),
        GOOD.replace("0a", ".."),
        GOOD.replace("0a", "0A"),
        GOOD.replace("0a", "0ab"),
        GOOD.replace("v3", "v03"),
        GOOD.replace("v3", "v-3"),
        GOOD.replace("v3", "v٣"),
        GOOD.replace("v3", "v9999999999"),
        GOOD.replace("v3", "3"),
        GOOD.replace("/", "//", 1),
        GOOD.replace("/", "\\"),
        GOOD.replace(".sbp", ""),
        GOOD.replace(".sbp", ".sbp\n"),
        GOOD.replace(".sbp", ".sbp\0"),
        GOOD.replace("req", "r\0q"),
        GOOD.replace("req", "r q"),
        GOOD.replace("req", "ré"),
        GOOD.replace("req", "r\udc80"),
        GOOD.replace("req-1-0123456789abcdef", "x" * 201),
        "v3/run-1/0a/.sbp",
        "v3/run-1/0a/..",
        "v3/run-1/0a/.req-1-0123456789abcdef.sbp.staging",
        "v3/run-1/0a/..sbp.staging",
        ".sideband-root.json",
        "v3/run-1/" + "0a/" * 100_000 + "x.sbp",
    ],
)
def test_paths_that_are_not_ours_are_refused_before_any_call(
    reader: PayloadReader, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    with monkeypatch.context() as patch:
        for call in ("open", "stat", "unlink"):
            patch.setattr(os, call, None)
        with pytest.raises(PathEscapesRoot) as caught:
            reader.header(file)
        assert caught.value.file == file
        assert len(str(caught.value)) < 1000
        str(caught.value).encode()  # it can be logged and sent


@pytest.mark.parametrize("file", ["", "..", GOOD.replace("run-1", ".."), GOOD + "\0"])
def test_sizes_and_deletions_refuse_them_too(root: PayloadRoot, file: str) -> None:
    for refuse in (root.size, root.delete):
        with pytest.raises(PathEscapesRoot):
            refuse(file)


def test_another_run_is_refused_by_its_path(root: PayloadRoot, reader: PayloadReader) -> None:
    for refuse in (reader.header, root.size, root.delete):
        with pytest.raises(OtherRunPayload) as caught:
            refuse(GOOD.replace("run-1", "run-2"))
        assert (caught.value.found, caught.value.expected) == ("run-2", "run-1")


@pytest.mark.parametrize("run_id", ["..", "", "a/b", "."])
def test_no_root_has_a_run_id_that_climbs(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(InvalidId, match="run_id"):
        PayloadRoot(tmp_path, RunId(run_id))


def test_versions_of_folders_are_those_that_we_make() -> None:
    assert [version_of_folder(version_folder(k)) for k in (0, 7, 999_999_999)] == [
        0,
        7,
        999_999_999,
    ]
    for name in ("v", "v01", "V1", "v1 ", "v1\n", "w1", "v1x", "v1234567890", ".v1"):
        assert version_of_folder(name) is None


def test_requests_spread_over_all_folders() -> None:
    folders = [fan_out(RequestId(f"request-{number}.a0")) for number in range(10_000)]
    counts = {hh: folders.count(hh) for hh in set(folders)}
    assert len(counts) == 256
    assert max(counts.values()) < 90


def outside(tmp_path: Path) -> Path:
    """A whole payload root elsewhere, with a file under the same relative path."""
    return tmp_path / "outside"


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_link_at_any_level_is_refused_though_it_leads_to_a_right_file(
    root: PayloadRoot, reader: PayloadReader, tmp_path: Path, depth: int
) -> None:
    other = make_root(outside(tmp_path))
    file = write_one(other).file or ""
    name = Path(*Path(file).parts[:depth])
    link = root.path / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(other.path / name)
    with pytest.raises(PathEscapesRoot):
        reader.header(file)
    if depth < 4:
        for refuse in (root.size, root.delete):
            with pytest.raises(PathEscapesRoot):
                refuse(file)
        with pytest.raises(PathEscapesRoot):
            root.files_of_request(3, REQUEST)
    else:
        assert root.size(file) is None
        assert root.delete(file) == 0  # the link goes, what it points to stays
    if depth > 2:
        assert list(root.files(3)) == []
    else:
        with pytest.raises(PathEscapesRoot):
            list(root.files(3))
    assert root.versions() == ([3] if depth > 2 else [])
    assert (other.path / file).exists()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_writer_never_follows_a_link(root: PayloadRoot, tmp_path: Path, depth: int) -> None:
    target = outside(tmp_path)
    target.mkdir()
    folders = ("v3", RUN, fan_out(REQUEST))
    link = root.path.joinpath(*folders[:depth])
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    with pytest.raises(PathEscapesRoot):
        write_one(root)
    assert list(target.iterdir()) == []


def test_a_dangling_link_is_refused(root: PayloadRoot, reader: PayloadReader) -> None:
    file = write_one(root).file or ""
    (root.path / file).unlink()
    (root.path / file).symlink_to("/nowhere")
    with pytest.raises(PathEscapesRoot):
        reader.header(file)


def replaced(root: PayloadRoot) -> tuple[str, Path]:
    file = write_one(root).file or ""
    path = root.path / file
    path.unlink()
    return file, path


def test_a_fifo_is_refused_without_waiting(root: PayloadRoot, reader: PayloadReader) -> None:
    file, path = replaced(root)
    os.mkfifo(path)
    failures: list[PayloadError] = []

    def read() -> None:
        try:
            reader.header(file)
        except PayloadError as exc:
            failures.append(exc)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert [type(failure) for failure in failures] == [PathEscapesRoot]


def test_a_socket_is_refused(root: PayloadRoot, reader: PayloadReader, tmp_path: Path) -> None:
    file, path = replaced(root)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        os.link(tmp_path / "s", path)
        with pytest.raises(PathEscapesRoot):
            reader.header(file)


def test_a_folder_in_place_of_a_file_is_refused(root: PayloadRoot, reader: PayloadReader) -> None:
    file, path = replaced(root)
    path.mkdir()
    with pytest.raises(PathEscapesRoot):
        reader.header(file)
    assert root.size(file) is None
    with pytest.raises(WriteFailed):
        root.delete(file)


def test_a_file_in_place_of_a_folder_is_refused(root: PayloadRoot, reader: PayloadReader) -> None:
    (root.path / "v3").write_text("not a folder")
    with pytest.raises(PathEscapesRoot):
        reader.header(GOOD)
    with pytest.raises(PathEscapesRoot):
        write_one(root)
    assert root.versions() == []


def test_a_device_is_refused(root: PayloadRoot, reader: PayloadReader) -> None:
    file, path = replaced(root)
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero never ends
    except PermissionError:
        pytest.skip("this user may not make devices")
    # A mount may refuse devices by itself, which is as good.
    with pytest.raises((PathEscapesRoot, ReadFailed)):
        reader.header(file)


def test_a_root_that_is_itself_a_link_is_the_operators_choice(tmp_path: Path) -> None:
    real = make_root(tmp_path / "real")
    (tmp_path / "link").symlink_to(real.path)
    linked = PayloadRoot.open(tmp_path / "link")
    file = write_one(linked).file or ""
    with PayloadReader(linked, model=None) as reader:
        assert reader.header(file).run_id == RUN
    assert real.size(file) == linked.size(file)


def test_a_root_that_went_away_is_not_found(root: PayloadRoot, reader: PayloadReader) -> None:
    file = write_one(root).file or ""
    root.path.rename(root.path.with_name("gone"))
    with pytest.raises(PayloadNotFound):
        reader.header(file)
    assert root.size(file) is None
    assert root.delete(file) == 0
    assert (root.versions(), list(root.files(3)), root.files_of_request(3, REQUEST)) == ([], [], [])
    with pytest.raises(WriteFailed):
        write(root, one_choice())
    with pytest.raises(WriteFailed):
        root.remove_version(3)


def test_a_path_is_a_plain_value() -> None:
    path = parse_path(GOOD, run_id=RUN)
    assert isinstance(path, PayloadPath)
    assert str(path) == GOOD
    assert parse_path("v3/run-1/0a/odd.sbp", run_id=RUN).request_id is None
