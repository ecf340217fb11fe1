"""A file appears whole or not at all, whatever fails and whenever the writer dies."""

import errno
import os
import pickle
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sideband.ids import RequestId
from sideband.payload import PayloadReader, PayloadRoot, WriteReport
from sideband.payload.durable import DurableFolders
from sideband.payload.errors import PathEscapesRoot, WriteFailed
from sideband.payload.io import IOV_MAX, read_exactly, write_all
from sideband.payload.paths import new_path
from sideband.payload.root import published
from tests.unit.payload.support import (
    GAPS,
    REQUEST,
    all_files,
    make_root,
    of_field,
    one_choice,
    rows_given,
    rows_read,
    write_one,
)

CHANGING = ("open", "mkdir", "writev", "fsync", "rename", "unlink")


class Killed(BaseException):
    """The process is gone: nothing after this reaches the disk."""


class Steps:
    """Lets the first ``alive`` changes happen; each later one raises ``death``."""

    def __init__(self, alive: int, death: Callable[[], BaseException], *, once: bool) -> None:
        self.alive, self.death, self.once = alive, death, once
        self.seen: list[str] = []
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "Steps":
        for name in CHANGING:
            self._patch.setattr(os, name, self._guarded(name, getattr(os, name)))
        return self

    def __exit__(self, *exc: object) -> None:
        self._patch.undo()

    def _guarded(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            self.seen.append(name)
            number = len(self.seen)
            is_dead = number == self.alive + 1 if self.once else number > self.alive
            if is_dead:
                raise self.death()
            return real(*args, **kwargs)

        return call


def steps_of_one_write(root: PayloadRoot) -> list[str]:
    with Steps(1000, Killed, once=False) as steps:
        write_one(root)
    return steps.seen


def visible(root: PayloadRoot) -> list[str]:
    return [file for file in all_files(root) if not file.endswith(".staging")]


def check_readable(root: PayloadRoot, report: WriteReport) -> None:
    given = rows_given(one_choice(), gaps=GAPS)
    with PayloadReader(root, model=None) as reader:
        for field, rows in given.items():
            assert rows_read(reader, of_field(report.segments[0], field), one_choice()) == rows


def test_the_steps_are_those_of_the_page(root: PayloadRoot) -> None:
    new_folders = ["mkdir"] * 3
    file = ["open", *["writev"] * 3, "fsync", "rename"]  # two blocks, then the front
    assert steps_of_one_write(root) == [*new_folders, *file, *["fsync"] * 4]
    assert steps_of_one_write(root) == [*file, "fsync"]  # the folders above are known


@pytest.mark.parametrize("alive", range(13))
def test_a_writer_killed_at_any_step_leaves_no_half_file(root: PayloadRoot, alive: int) -> None:
    with Steps(alive, Killed, once=False), pytest.raises(Killed):
        write_one(root)
    is_renamed = alive > 8
    assert len(visible(root)) == is_renamed
    for file in visible(root):
        with PayloadReader(root, model=None) as reader:
            assert len(reader.header(file).sections) == 2
    leftovers = [file for file in all_files(root) if file.endswith(".staging")]
    assert len(leftovers) == (3 < alive <= 8)
    for file in leftovers:
        with PayloadReader(root, model=None) as reader, pytest.raises(PathEscapesRoot):
            reader.header(file)
    # Whoever cleans up sees all of it, by request and by version.
    found = root.files_of_request(3, REQUEST)
    assert sorted(found) == sorted(all_files(root))
    assert sorted(stored.file for stored in root.files(3)) == sorted(found)
    for file in found:
        size_bytes = (root.path / file).stat().st_size
        assert root.delete(file) == size_bytes
    assert all_files(root) == set()
    report = write_one(root)
    check_readable(root, report)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("alive", range(13))
def test_an_error_at_any_step_is_translated_and_leaves_nothing(
    root: PayloadRoot, alive: int, number: int
) -> None:
    def death() -> OSError:
        return OSError(number, os.strerror(number))

    with Steps(alive, death, once=True), pytest.raises(WriteFailed) as caught:
        write_one(root)
    assert caught.value.errno == number
    assert os.strerror(number) in str(caught.value)
    assert all_files(root) == set()
    write_one(root)


def test_an_error_while_cleaning_up_does_not_hide_the_first(root: PayloadRoot) -> None:
    numbers = iter([errno.ENOSPC, errno.EIO, errno.EIO])

    def death() -> OSError:
        return OSError(next(numbers), "no")

    with Steps(5, death, once=False), pytest.raises(WriteFailed) as caught:
        write_one(root)
    assert caught.value.errno == errno.ENOSPC
    (leftover,) = all_files(root)
    assert leftover.endswith(".staging")
    assert root.files_of_request(3, REQUEST) == [leftover]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_filesystem_that_cannot_sync_folders_is_written_to(
    root: PayloadRoot, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    whole = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        whole(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    assert write_one(root).file is not None


def test_files_and_folders_serve_a_group(root: PayloadRoot) -> None:
    before = os.umask(0o002)
    try:
        file = write_one(root).file or ""
    finally:
        os.umask(before)
    assert stat.S_IMODE((root.path / file).stat().st_mode) == 0o664
    assert stat.S_IMODE((root.path / file).parent.stat().st_mode) == 0o775


def test_partial_writes_are_written_on(root: PayloadRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.writev

    def partial(fd: int, buffers: list[memoryview]) -> int:
        return whole(fd, [buffers[0][: 1 + len(buffers[0]) // 2]])

    monkeypatch.setattr(os, "writev", partial)
    report = write_one(root)
    monkeypatch.undo()
    check_readable(root, report)


def test_a_write_without_progress_is_an_error(
    root: PayloadRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "writev", lambda fd, buffers: 0)
    with pytest.raises(WriteFailed, match="nothing was written"):
        write_one(root)
    assert all_files(root) == set()


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    parts = [bytes([number % 251]) * (number % 3) for number in range(3 * IOV_MAX)]
    with (tmp_path / "file").open("wb") as file:
        write_all(file.fileno(), parts)
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    buffers = [bytearray(len(part)) for part in parts]
    with (tmp_path / "file").open("rb") as file:
        read_exactly(file.fileno(), buffers, 0, file="file")
    assert [bytes(buffer) for buffer in buffers] == parts


def test_arrays_of_any_shape_are_buffers(tmp_path: Path) -> None:
    rows = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    with (tmp_path / "file").open("w+b") as file:
        write_all(file.fileno(), [rows.data])
        out = np.zeros_like(rows)
        read_exactly(file.fileno(), [out.data], 0, file="file")
    assert np.array_equal(out, rows)


@contextmanager
def synced_folders() -> Iterator[list[str]]:
    """The folders that are synced inside the block, by name."""
    synced: list[str] = []
    whole = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        whole(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield synced


def test_folders_above_are_synced_once(root: PayloadRoot) -> None:
    hh = Path(write_one(root).file or "").parts[2]
    with synced_folders() as synced:
        write_one(root)
        assert synced == [hh]
        write_one(root, policy_version=4)  # another version: root, version and run have new names
        assert synced == [hh, hh, "run-1", "v4", "payloads"]
        write_one(root, policy_version=4)
        assert synced[5:] == [hh]
        report = write_one(root, request_id="another")
        other = Path(report.file or "").parts[2]
        assert other != hh
        assert synced[6:] == [other, "run-1", "payloads"]  # which has got a v4 meanwhile


def test_a_folder_that_another_writer_made_is_synced_by_each_process(root: PayloadRoot) -> None:
    hh = Path(write_one(root).file or "").parts[2]
    elsewhere = PayloadRoot.open(root.path)  # as another process would
    with synced_folders() as synced:
        write_one(elsewhere)
    assert synced == [hh, "run-1", "v3", "payloads"]


def test_a_folder_made_anew_is_synced_anew(root: PayloadRoot) -> None:
    hh = Path(write_one(root).file or "").parts[2]
    root.remove_version(3)
    with synced_folders() as synced:
        write_one(root)
    assert synced == [hh, "run-1", "v3", "payloads"]


def test_folders_that_another_process_made_anew_are_synced_anew(
    root: PayloadRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A filesystem that gives each new folder the inode of a removed one.
    monkeypatch.setattr("sideband.payload.durable._key", lambda fd, names: (names, 0, 0))
    hh = Path(write_one(root).file or "").parts[2]
    for folder in (root.path, root.path / "v3", root.path / "v3" / "run-1"):
        os.utime(folder, ns=(10**18, 10**18))  # a while ago: clocks of filesystems are coarse
    write_one(root)
    with synced_folders() as synced:
        write_one(root)
        assert synced == [hh]
    PayloadRoot.create(root.path, root.run_id, fresh=True)
    write_one(PayloadRoot.open(root.path))  # as another process would
    with synced_folders() as synced:
        write_one(root)
    assert synced == [hh, "run-1", "v3", "payloads"]


def test_a_folder_whose_sync_failed_is_not_known(root: PayloadRoot) -> None:
    with Steps(8, lambda: OSError(errno.EIO, "no"), once=True), pytest.raises(WriteFailed):
        write_one(root)
    with synced_folders() as synced:
        write_one(root)
    assert synced[1:] == ["run-1", "v3", "payloads"]


def test_an_engine_that_opens_the_root_each_time_keeps_what_is_known(root: PayloadRoot) -> None:
    durable = DurableFolders()
    for _ in range(2):
        opened = PayloadRoot.open(root.path, durable=durable)
        with synced_folders() as synced:
            write_one(opened)
    assert len(synced) == 1


def test_what_is_known_is_bounded(root: PayloadRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sideband.payload.durable._KNOWN_MAX", 5)
    for number in range(20):
        write_one(root, request_id=f"request-{number}")
    assert len(root.durable._known) <= 5


def test_a_root_sent_to_another_process_is_the_same_root(root: PayloadRoot) -> None:
    write_one(root)
    sent = pickle.loads(pickle.dumps(root))
    assert sent == root
    assert hash(sent) == hash(root)
    assert sent.durable._known == {}
    assert write_one(sent, request_id=RequestId("from-there")).file is not None


def test_a_folder_that_another_writer_makes_at_the_same_moment(
    root: PayloadRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.mkdir

    def slow_mkdir(*args: Any, **kwargs: Any) -> None:
        whole(*args, **kwargs)
        whole(*args, **kwargs)  # the second raises FileExistsError, as for the slower one of two

    monkeypatch.setattr(os, "mkdir", slow_mkdir)
    report = write_one(root)
    monkeypatch.undo()
    check_readable(root, report)


def test_a_version_removed_under_a_writer_is_an_error_and_not_a_file_elsewhere(
    root: PayloadRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_one(root)
    whole = os.open

    def swept(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            monkeypatch.undo()
            root.remove_version(3)
        return whole(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", swept)
    with pytest.raises(WriteFailed) as caught:
        write_one(root)
    assert caught.value.errno == errno.ENOENT
    assert all_files(root) == set()


def test_a_second_root_of_the_same_path_reads_what_the_first_wrote(root: PayloadRoot) -> None:
    report = write_one(root)
    check_readable(make_root(root.path), report)


def test_a_writer_takes_over_no_file_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are random; two writers that draw the same one do not write into one file."""
    monkeypatch.setattr("secrets.token_hex", lambda count: "0123456789abcdef"[: 2 * count])
    root = make_root(tmp_path / "root")
    path = new_path(3, root.run_id, REQUEST)
    with published(root, path) as fd:
        write_all(fd, [b"the first one's"])
        with pytest.raises(WriteFailed), published(root, path):
            raise AssertionError("the second one writes")
    (file,) = all_files(root)
    assert (root.path / file).read_bytes() == b"the first one's"
